"""Tables of databases by options alone: files of SQLite and DuckDB, servers of PostgreSQL and MariaDB."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import math
import os
import random
import shutil
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pymysql
import pytest

import pyspark_lookup.lookup.runtime
from pyspark_lookup import LookupTable, lookup_join
from pyspark_lookup.errors import LookupFunctionError, OptionError, SchemaError
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.sources.providers.databases.adbc import AdbcDatabase, Bigquery, FlightSql, Snowflake
from pyspark_lookup.sources.providers.databases.address import Address
from pyspark_lookup.sources.providers.databases.database_table import DATABASES
from pyspark_lookup.storage.context import in_thread
from tests.support.databases import Database, Options
from tests.support.fakes import FakeClock
from tests.support.fuzzing import by_day
from tests.support.lookup_functions import TEXTS, counted, ids
from tests.support.postgres import PostgresServer
from tests.support.spark_tables import CONNECT, run_script
from tests.support.sparks import DATA_SOURCES, needs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTIAL = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-write": "1 h"}
FULL = {"lookup.cache": "FULL", "lookup.full-cache.build-wait": "1 h"}
ONCE = {"lookup.max-retries": "0"}
PEOPLE = pa.table({"id": [1, 2, 2, 3], "name": ["one", "two", "zwei", None], "n": [10, 20, 21, 30]})
REQUESTED = ids(1, 2, 9, 3, 1, None)
ANSWER = [(0, 1, "one", 10), (1, 2, "two", 20), (1, 2, "zwei", 21), (3, 3, None, 30), (4, 1, "one", 10)]


def sort_rows(rows: pa.Table) -> list[tuple[int, int, str | None, int]]:
    """Rows of people in one order: within a key there is none."""
    tuples = [(row["key_index"], row["id"], row["name"], row["n"]) for row in rows.to_pylist()]
    return sorted(tuples, key=repr)


def test_rows_of_keys(database: Database) -> None:
    """Every row of a key comes, for each time that it was asked for; absent keys and null have none."""
    table = database.table(database.create_table(PEOPLE), "id")
    assert sort_rows(table.get_many(REQUESTED)) == ANSWER
    assert table.get(9) == table.get(None) == []
    assert table.get_many(ids()).num_rows == 0


def test_composite_keys(database: Database) -> None:
    """A key of two columns finds the rows that have both, not one of each; they may be named in any order."""
    name = database.create_table(pa.table({"a": [1, 1, 2, 1], "b": ["x", "y", "x", "x"], "v": [1, 2, 3, 4]}))
    rows = database.table(name, "b,a").get_many(pa.table({"b": ["x", "y", "y", None], "a": [1, 1, 2, 1]}))
    assert sorted((row["key_index"], row["v"]) for row in rows.to_pylist()) == [(0, 1), (0, 4), (1, 2)]


def test_text_is_never_sql(database: Database) -> None:
    """Keys, and names of tables and columns, that look like SQL are what they are."""
    texts = [*TEXTS, "x" * 5000]
    name = database.create_table(
        pa.table({'k "1" ?%': texts, "Select": range(len(texts))}), "t\"`'; DROP TABLE x; --?$1%s"
    )
    keys = pa.table({'k "1" ?%': [*texts, *(text + suffix for suffix in ("'", "\0") for text in texts)]})
    rows = database.table(name, '`k "1" ?%`').get_many(keys).to_pylist()
    assert [(row["key_index"], row["Select"]) for row in rows] == [(n, n) for n in range(len(texts))]


def test_only_selected_columns_are_fetched(database: Database) -> None:
    """`lookup.columns` reaches the statement, in any letter case."""
    name = database.create_table(PEOPLE)
    assert database.table(name, "id", {"lookup.columns": "NAME"}).get(1) == [{"id": 1, "name": "one"}]
    statement = database.statements()[-1]
    assert database.quoted("name") in statement
    assert database.quoted("n") not in statement


UTC = datetime.timezone.utc
TEXT, LAST = pa.string(), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)
UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
POSTGRES = [
    ("smallint", "-32768", pa.int16(), -32768),
    ("integer", "2147483647", pa.int32(), 2**31 - 1),
    ("bigint", "-9223372036854775808", pa.int64(), -(2**63)),
    ("oid", "4294967295", pa.int64(), 2**32 - 1),
    ("boolean", "true", pa.bool_(), True),
    ("real", "1e-45", pa.float32(), 1.401298464324817e-45),
    ("double precision", "5e-324", pa.float64(), 5e-324),
    ("numeric(10, 2)", "1.5", pa.decimal128(10, 2), decimal.Decimal("1.50")),
    ("numeric(38, 0)", "9" * 38, pa.decimal128(38, 0), decimal.Decimal("9" * 38)),
    ("numeric(2, -3)", "1499", pa.decimal128(5, 0), decimal.Decimal(1000)),
    ("numeric(2, 4)", "0.0015", pa.decimal128(4, 4), decimal.Decimal("0.0015")),
    ("numeric", "'NaN'", TEXT, "NaN"),
    ("numeric(40, 1)", "1.5", TEXT, "1.5"),
    ("text", "'ä€𝄞'", TEXT, "ä€𝄞"),
    ("varchar(9)", "'a '", TEXT, "a "),
    ("char(3)", "'a'", TEXT, "a  "),
    ("bytea", "'\\x00ff'", pa.binary(), b"\x00\xff"),
    ("date", "'2024-02-29'", pa.date32(), datetime.date(2024, 2, 29)),
    ("date", "'infinity'", pa.date32(), LAST.date()),
    ("timestamp", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("timestamp", "'-infinity'", pa.timestamp("us"), datetime.datetime(1, 1, 1)),
    ("timestamptz", "'2024-02-29 12:30:45+02'", pa.timestamp("us", "UTC"), datetime.datetime(2024, 2, 29, 10, 30, 45, tzinfo=UTC)),
    ("timestamptz", "'infinity'", pa.timestamp("us", "UTC"), LAST.replace(tzinfo=UTC)),
    ("uuid", f"'{UUID.upper()}'", TEXT, UUID),
    ("mood", "'sad'", TEXT, "sad"),
    ("positive", "5", pa.int32(), 5),
    ("jsonb", "'{\"a\": 1}'", TEXT, '{"a": 1}'),
    ("time", "'12:30'", TEXT, "12:30:00"),
    ("interval", "'1 day 2 hours'", TEXT, "1 day 02:00:00"),
    ("money", "'1.5'", TEXT, "$1.50"),
    ("inet", "'10.0.0.1'", TEXT, "10.0.0.1/32"),  # as PostgreSQL itself casts it
    ("int4range", "'[1,3)'", TEXT, "[1,3)"),
    ("pair", "'(1,b)'", TEXT, "(1,b)"),
    ("integer[]", "'{1, NULL}'", pa.list_(pa.int32()), [1, None]),
    ("text[]", "'{a, NULL}'", pa.list_(TEXT), ["a", None]),
    ("date[]", "'{infinity}'", pa.list_(TEXT), ["infinity"]),
    ("numeric(3, 1)[]", "'{1.5}'", pa.list_(TEXT), ["1.5"]),
]  # fmt: skip


def test_postgres_keys_that_are_equal_to_the_database_only(postgres: Database) -> None:
    """A key finds the rows that have it, byte by byte, whatever the type or the collation of the column holds for equal."""
    postgres.execute("CREATE COLLATION lax (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
    name = postgres.create("a text COLLATE lax, b char(4), u uuid", f"('ab', 'ab', '{UUID}')", "('AB', 'AB', NULL)")
    assert [row["a"] for row in postgres.table(name, "a").get("AB")] == ["AB"]
    assert postgres.table(name, "b").get("ab") == []
    assert [row["a"] for row in postgres.table(name, "b").get("ab  ")] == ["ab"]
    rows = postgres.table(name, "u").get_many(pa.table({"u": [UUID, UUID.upper(), "no uuid", f"{{{UUID}}}"]}))
    assert rows["key_index"].to_pylist() == [0]


@pytest.mark.parametrize(
    ("fixture", "collation"), [("postgres", "lax"), ("duckdb_file", "NOCASE"), ("sqlite", "NOCASE")]
)
def test_a_row_comes_once(request: pytest.FixtureRequest, fixture: str, collation: str) -> None:
    """A row comes once, if the database holds several keys for equal to its own; also from the cache."""
    database: Database = request.getfixturevalue(fixture)
    if fixture == "postgres":
        database.execute(
            "CREATE COLLATION IF NOT EXISTS lax (provider = icu, locale = 'und-u-ks-level1', deterministic = false)"
        )
    name = database.create(f"a INTEGER, b TEXT COLLATE {collation}", "(1, 'Ab')", "(1, 'ab')")
    for keys, columns in (("b", {}), ("a,b", {"a": [1] * 3})):
        table = database.table(name, keys, PARTIAL)
        rows = table.get_many(pa.table({**columns, "b": ["AB", "Ab", "aB"]}))
        assert [(row["key_index"], row["b"]) for row in rows.to_pylist()] == [(1, "Ab")]
        assert table.get(*(["Ab"] if keys == "b" else [(1, "Ab")])) == [{"a": 1, "b": "Ab"}]


@pytest.mark.parametrize("fixture", ["postgres", "duckdb_file"])
def test_keys_that_are_infinite_times(request: pytest.FixtureRequest, fixture: str) -> None:
    """The first and the last time find the rows with infinite times, for which they stand, and those with these times; also in keys of two columns."""
    database: Database = request.getfixturevalue(fixture)
    name = database.create(
        "d DATE, z TIMESTAMPTZ, n INTEGER",
        "('infinity', 'infinity', 1)", "('9999-12-31', '-infinity', 2)", "('-infinity', '9999-12-31 23:59:59.999999Z', 3)",
        "('infinity', '2024-01-01 00:00:00Z', 4)", "('2024-01-01', 'infinity', 5)",
    )  # fmt: skip
    first, last = datetime.datetime(1, 1, 1, tzinfo=UTC), LAST.replace(tzinfo=UTC)
    for row in database.table(name, "n").scan().to_pylist():
        key = (row["d"], row["z"])
        assert row["n"] in [match["n"] for match in database.table(name, "d,z").get(key)]
    found = database.table(name, "d").get_many(pa.table({"d": [LAST.date(), first.date()]}))
    assert sorted(zip(found["key_index"].to_pylist(), found["n"].to_pylist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (0, 4),
        (1, 3),
    ]
    assert sorted(row["n"] for row in database.table(name, "z").get(last)) == [1, 3, 5]


def test_postgres_times_that_it_does_not_have(postgres: Database) -> None:
    """A time that the column cannot hold is the key of no row, and no error for others; years before the first are found."""
    name = postgres.create(
        "id INTEGER, d date, t timestamp, z timestamptz",
        "(1, '0044-03-15 BC', '0044-03-15 12:00 BC', '0044-03-15 12:00Z BC')", "(2, '10000-01-01', '10000-01-01', '10000-01-01')",
    )  # fmt: skip
    table = postgres.table(name, "id").scan()
    for column, unit in (("d", pa.int32()), ("t", pa.int64()), ("z", pa.int64())):
        extremes = pa.array([-(2 ** (unit.bit_width - 1)), 2 ** (unit.bit_width - 1) - 1], unit)
        kind = table.schema.field(column).type
        keys = pa.concat_arrays([extremes.cast(kind), table[column].combine_chunks()])
        rows = postgres.table(name, column).get_many(pa.table({column: keys}))
        assert rows["key_index"].to_pylist() == [2, 3]


def test_postgres_times_that_are_too_late(postgres: Database) -> None:
    """A time after the last one of Arrow raises an error; it does not become one before 1970. The last one is read."""
    last = "294247-01-10 04:00:54.775807"
    name = postgres.create(
        "id integer, t timestamp, z timestamptz", f"(1, '{last}', '{last}Z')", f"(2, '{last}', '294247-01-10 04:00:54.775808Z')", "(3, '294250-01-01', NULL)"
    )  # fmt: skip
    rows = postgres.table(name, "id", {**ONCE, "lookup.where": "id = 1"}).scan()
    assert rows.select(["t", "z"]).cast(pa.schema([("t", pa.int64()), ("z", pa.int64())])).to_pylist() == [
        {"t": 2**63 - 1, "z": 2**63 - 1}
    ]
    for key in (2, 3):
        with pytest.raises(LookupFunctionError, match=f"is later than {last} UTC"):
            postgres.table(name, "id", ONCE).get(key)


def test_postgres_a_column_that_became_wider(postgres: Database) -> None:
    """A table that is open is looked up in after a column became wider."""
    name = postgres.create("id INTEGER, n INTEGER", "(1, 10)")
    table = postgres.table(name, "id", ONCE)
    assert table.get(1) == [{"id": 1, "n": 10}]
    postgres.execute(f"ALTER TABLE {name} ALTER n TYPE bigint")
    assert table.get(1) == [{"id": 1, "n": 10}]


def test_duckdb_keys_in_nanoseconds(duckdb_file: Database) -> None:
    """A time in nanoseconds is found by the microsecond that the column shows, which is the nearest one."""
    name = duckdb_file.create("t TIMESTAMP_NS, n INTEGER", "('2024-01-01 10:00:00.123456789', 1)")
    (row,) = duckdb_file.table(name, "n").scan().to_pylist()
    assert row["t"].microsecond == 123457
    assert duckdb_file.table(name, "t").get(row["t"]) == [row]


def test_duckdb_numbers_that_are_too_large(duckdb_file: Database) -> None:
    """A number of more than 38 digits raises an error, also in a list; it does not become another number. It keeps no other row from being found."""
    name = duckdb_file.create(
        "id INTEGER, h HUGEINT, u UHUGEINT, l STRUCT(HUGEINT HUGEINT, u UHUGEINT[])",
        "(1, 5, 5, {'HUGEINT': 5, 'u': [5]})", f"(2, {2**127 - 1}, NULL, NULL)", f"(3, NULL, {2**128 - 1}, NULL)", f"(4, NULL, NULL, {{'HUGEINT': 5, 'u': [{2**127}]}})",
    )  # fmt: skip
    row = {"id": 1, "h": 5, "u": 5, "l": {"HUGEINT": 5, "u": [5]}}
    for key in ("id", "h", "u"):
        assert duckdb_file.table(name, key).get(5 if key != "id" else 1) == [row]
    for where in ("h < 6", "u = 5"):
        assert duckdb_file.table(name, "id", {"lookup.where": where}).scan().to_pylist() == [row]
    for key in (2, 3, 4):
        with pytest.raises(LookupFunctionError, match=r"to DECIMAL\(38,0\)"):
            duckdb_file.table(name, "id", ONCE).get(key)


def test_sqlite_names_of_the_query_are_its_own(sqlite: Database) -> None:
    """A table has any name, also a short one that a statement could use."""
    for name in ("k", "t"):
        sqlite.execute(f"CREATE TABLE {name} (k0 INTEGER)")
        sqlite.execute(f"INSERT INTO {name} VALUES (1)")
        assert sqlite.table(name, "k0").get(9) == []
        assert sqlite.query(f"SELECT k0 AS id FROM {name}", "id").get(1) == [{"id": 1}]


def test_postgres_scans_by_time(postgres: Database) -> None:
    """The database decides conditions on times, which are instants where the column's are."""
    name = postgres.create("at timestamptz, day date", "('2024-01-01 12:00+02', '2024-01-01')", "('infinity', NULL)")
    for where, count in (
        ("at < TIMESTAMP'2024-01-01 11:00:00Z'", 1),
        ("at >= TIMESTAMP'2024-01-01 11:00:00Z'", 1),
        ("day = DATE'2024-01-01'", 1),
    ):
        assert postgres.table(name, "at", {"lookup.where": where}).scan().num_rows == count


def test_postgres_arrays_of_several_dimensions(postgres: Database) -> None:
    """An array of several dimensions raises an error; it does not become a list that has lost the dimensions."""
    name = postgres.create("id integer, a integer[]", "(1, '{{1,2},{3,4}}')", "(2, '{1}')")
    assert postgres.table(name, "id", ONCE).get(2) == [{"id": 2, "a": [1]}]
    with pytest.raises(LookupFunctionError, match=r"\[1:2\]\[1:2\] is an array of several dimensions"):
        postgres.table(name, "id", ONCE).get(1)


SQLITE = [
    ("INTEGER", "-9223372036854775808", pa.int64(), -(2**63)),
    ("bigint unsigned", "9223372036854775807", pa.int64(), 2**63 - 1),
    ("REAL", "5e-324", pa.float64(), 5e-324),
    ("double precision", "1", pa.float64(), 1.0),
    ("VARCHAR(9)", "'ä€𝄞'", TEXT, "ä€𝄞"),
    ("TEXT", "1", TEXT, "1"),
    ("BLOB", "x'00ff'", pa.binary(), b"\x00\xff"),
    ("BOOLEAN", "1", pa.bool_(), True),
    ("DATE", "'2024-02-29'", pa.date32(), datetime.date(2024, 2, 29)),
    ("DATETIME", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("TIMESTAMP", "'2024-02-29T12:30'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30)),
    ("DECIMAL(10, 2)", "1.10", pa.decimal128(10, 2), decimal.Decimal("1.10")),
    ("NUMERIC(5)", "7", pa.decimal128(5, 0), decimal.Decimal(7)),
]  # fmt: skip


MARIADB = [
    ("TINYINT UNSIGNED", "255", pa.int16(), 255),
    ("MEDIUMINT", "-8388608", pa.int32(), -(2**23)),
    ("BIGINT UNSIGNED", "18446744073709551615", pa.decimal128(20, 0), decimal.Decimal(2**64 - 1)),
    ("BOOL", "1", pa.int8(), 1),
    ("YEAR", "2155", pa.int16(), 2155),
    ("FLOAT", "0.1", pa.float32(), 0.10000000149011612),
    ("DOUBLE", "5e-300", pa.float64(), 5e-300),
    ("DECIMAL(10, 2)", "1.5", pa.decimal128(10, 2), decimal.Decimal("1.50")),
    ("DECIMAL(5, 0) UNSIGNED", "7", pa.decimal128(5, 0), decimal.Decimal(7)),
    ("DECIMAL(65, 30)", "1.5", TEXT, "1." + "5".ljust(30, "0")),
    ("DATE", "'2024-02-29'", pa.date32(), datetime.date(2024, 2, 29)),
    ("DATETIME(6)", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("TIMESTAMP NULL", "from_unixtime(1709202645)", pa.timestamp("us", "UTC"), datetime.datetime(2024, 2, 29, 10, 30, 45, tzinfo=UTC)),
    ("TIME", "'-838:59:59'", TEXT, "-838:59:59"),
    ("CHAR(5)", "'ab '", TEXT, "ab"),
    ("VARCHAR(9) CHARACTER SET latin1", "'ä '", TEXT, "ä "),
    ("TEXT", "'ä€𝄞'", TEXT, "ä€𝄞"),
    ("ENUM('x', 'y')", "'y'", TEXT, "y"),
    ("SET('x', 'y')", "'x,y'", TEXT, "x,y"),
    ("JSON", "'{\"a\": 1}'", TEXT, '{"a": 1}'),
    ("BINARY(3)", "x'00ff00'", pa.binary(), b"\x00\xff\x00"),
    ("BLOB", "x'00ff'", pa.binary(), b"\x00\xff"),
    ("BIT(3)", "b'101'", pa.binary(), b"\x05"),
    ("UUID", f"'{UUID.upper()}'", TEXT, UUID),
    ("INET6", "'::1'", TEXT, "::1"),
]  # fmt: skip
DUCKDB = [
    ("UTINYINT", "255", pa.int16(), 255),
    ("UBIGINT", "18446744073709551615", pa.decimal128(20, 0), decimal.Decimal(2**64 - 1)),
    ("HUGEINT", "9" * 38, pa.decimal128(38, 0), decimal.Decimal("9" * 38)),
    ("UHUGEINT", "9" * 38, pa.decimal128(38, 0), decimal.Decimal("9" * 38)),
    ("DECIMAL(10, 2)", "1.5", pa.decimal128(10, 2), decimal.Decimal("1.50")),
    ("DOUBLE", "5e-324", pa.float64(), 5e-324),
    ("VARCHAR", "'ä€𝄞'", TEXT, "ä€𝄞"),
    ("BLOB", "'\\x00\\xFF'::BLOB", pa.binary(), b"\x00\xff"),
    ("DATE", "'2024-02-29'", pa.date32(), datetime.date(2024, 2, 29)),
    ("TIMESTAMP_NS", "'2024-02-29 12:30:45.123456'", pa.timestamp("us"), datetime.datetime(2024, 2, 29, 12, 30, 45, 123456)),
    ("TIMESTAMPTZ", "'2024-02-29 12:30:45+02'", pa.timestamp("us", "UTC"), datetime.datetime(2024, 2, 29, 10, 30, 45, tzinfo=UTC)),
    ("TIMESTAMPTZ", "'infinity'", pa.timestamp("us", "UTC"), LAST.replace(tzinfo=UTC)),
    ("DATE", "'-infinity'", pa.date32(), datetime.date(1, 1, 1)),
    ("UUID", f"'{UUID.upper()}'", TEXT, UUID),
    ("ENUM('x', 'y')", "'y'", TEXT, "y"),
    ("JSON", "'{}'", TEXT, "{}"),
    ("TIME", "'12:30'", TEXT, "12:30:00"),
    ("INTERVAL", "'1 day'", TEXT, "1 day"),
    ("BIT", "'101'", TEXT, "101"),
    ("INTEGER[]", "[1, NULL]", pa.list_(pa.int32()), [1, None]),
    ("STRUCT(a INTEGER)", "{'a': 1}", pa.struct([("a", pa.int32())]), {"a": 1}),
]  # fmt: skip


CASES = {"postgresql": POSTGRES, "sqlite": SQLITE, "mariadb": MARIADB, "duckdb": DUCKDB}
NO_KEYS = {
    "sqlite": ["DATETIME", "TIMESTAMP", "DECIMAL(10, 2)", "NUMERIC(5)"],  # SQLite has no such types
    "mariadb": ["BIT(3)"],  # which equals no bytes
}
NEW_TYPES = """CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE TYPE pair AS (a int, b text);
    CREATE DOMAIN positive AS integer CHECK (value > 0)"""


def test_values_and_keys_of_every_type(database: Database) -> None:
    """Lookups, scans and copies return each type's value and null in its Arrow type; the values are a key that finds its row."""
    if database.scheme == "postgresql":
        database.execute(NEW_TYPES)
    cases = CASES[database.scheme]
    declared = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(cases))
    values, nulls = ", ".join(text for _, text, *_ in cases), ", ".join(["NULL"] * len(cases))
    name = database.create(f"id INTEGER, {declared}", f"(1, {values})", f"(2, {nulls})")
    table, full = database.table(name, "id"), {"lookup.cache": "FULL", "lookup.version-query": "SELECT 1; -- one"}
    copy = database.table(name, "id", full)
    for rows in (table.get_many(ids(1, 2)).drop_columns("key_index"), table.scan(), copy.scan()):
        assert rows.schema.types[1:] == [kind for *_, kind, _ in cases]
        first, second = sorted(rows.to_pylist(), key=lambda row: row["id"])
        assert list(first.values())[1:] == [value for *_, value in cases]
        assert list(second.values())[1:] == [None] * len(cases)
    keys = {}
    for number, (kind, _, arrow, value) in enumerate(cases):
        if kind in NO_KEYS.get(database.scheme, ()):
            with pytest.raises(OptionError, match=rf"key column 'c{number}' .* cast the column there"):
                database.table(name, f"c{number}")
        elif not pa.types.is_nested(arrow):
            keys[f"c{number}"] = pa.array([value], arrow)
    assert database.table(name, ",".join(keys)).get_many(pa.table(keys))["id"].to_pylist() == [1]


def test_mariadb_keys_that_are_equal_to_the_database_only(mariadb: Database) -> None:
    """A key finds the rows that have it, byte by byte; a text that the column's character set lacks is the key of no row, and no error."""
    name = mariadb.create(
        "a VARCHAR(9), b VARCHAR(9) CHARACTER SET latin1, u UUID, d DOUBLE",
        f"('ab', 'ä', '{UUID}', 0.5)",
        "('AB ', '??', NULL, 1.5)",
    )
    rows = mariadb.table(name, "d").get_many(pa.table({"d": [math.nan, math.inf, 1.5]}))
    assert rows["key_index"].to_pylist() == [2]
    assert mariadb.table(name, "d").get(-math.inf) == []
    rows = mariadb.table(name, "a").get_many(pa.table({"a": ["AB", "AB ", "ab", "Ab"]}))
    assert [(row["key_index"], row["a"]) for row in rows.to_pylist()] == [(1, "AB "), (2, "ab")]
    rows = mariadb.table(name, "b").get_many(pa.table({"b": ["日本", "ä", "Ä", "??"]}))
    assert rows["key_index"].to_pylist() == [1, 3]
    assert mariadb.table(name, "u").get_many(pa.table({"u": [UUID, UUID.upper(), "no uuid"]}))[
        "key_index"
    ].to_pylist() == [0]


def test_mariadb_values_that_are_no_time(mariadb: Database) -> None:
    """The day 0000-00-00 is an error that names the column."""
    mariadb.execute("SET sql_mode = ''")
    name = mariadb.create("id INTEGER, d DATE", "(1, '0000-00-00')", "(2, '2024-01-01')")
    table = mariadb.table(name, "id", ONCE)
    assert table.get(2)[0]["d"] == datetime.date(2024, 1, 1)
    with pytest.raises(
        LookupFunctionError,
        match=r"column .*'d.* has a value that is not of type date32.*0000-00-00.*convert it in a SELECT in lookup.query",
    ):
        table.get(1)


def test_mariadb_years(mariadb: Database) -> None:
    """A number is the year with this number. The server reads the numbers 1 to 99 as years of two digits, and compares no later year than 2155."""
    name = mariadb.create("id INTEGER, y YEAR", "(1, 0)", "(2, 1955)", "(3, 1970)", "(4, 2005)", "(5, NULL)")
    for where, found in (
        ("y >= 1", [2, 3, 4]),
        ("y < 70", [1]),
        ("y < 2156", [1, 2, 3, 4]),
        ("y > -1", [1, 2, 3, 4]),
        ("y = 70", []),
        ("y IN (5, 55, 1955)", [2]),
        ("y = 0", [1]),
    ):
        assert sorted(mariadb.table(name, "id", {"lookup.where": where}).scan()["id"].to_pylist()) == found, where
    keys = pa.table({"y": [70, 5, 0, -1, 1970, 2155, 2156, 99, 1]})
    rows = mariadb.table(name, "y").get_many(keys)
    assert sorted(zip(*rows.select(["key_index", "id"]).to_pydict().values(), strict=True)) == [(2, 1), (4, 3)]


def test_mariadb_times_that_python_does_not_have(mariadb: Database) -> None:
    """A time before the year 0 or after the year 9999 is the key of no row, and no error. A time of the year 0 is the key of its rows."""
    days = pa.array([-719_529, -719_528 + 31, 19_782, 2_932_897], pa.int32()).cast(pa.date32())
    name = mariadb.create("d DATE, dt DATETIME(6), ts TIMESTAMP NULL", "('0000-02-01', '0000-02-01', NULL)")
    mariadb.execute(f"INSERT INTO {name} VALUES ('2024-02-29', '2024-02-29', '2024-02-29'), (NULL, NULL, NULL)")
    for key, kind, found in (
        ("d", pa.date32(), [1, 2]),
        ("dt", pa.timestamp("us"), [1, 2]),
        ("ts", pa.timestamp("us", "UTC"), [2]),
    ):
        table = mariadb.query(f"SELECT {key} FROM {name}", key, ONCE)
        assert sorted(table.get_many(pa.table({key: days.cast(kind)}))["key_index"].to_pylist()) == found
    last = pa.array([253_402_300_800_000_000, 2**60, 2**63 - 1, -(2**63)]).cast(pa.timestamp("us"))
    table, statement_count = mariadb.table(name, "dt", ONCE), len(mariadb.statements())
    assert table.get_many(pa.table({"dt": last})).num_rows == 0
    assert len(mariadb.statements()) == statement_count  # the server is not asked for them


@pytest.mark.parametrize(
    "setting",
    ["sql_mode = 'ANSI,PAD_CHAR_TO_FULL_LENGTH'", "sql_mode = 'EMPTY_STRING_IS_NULL'", "sql_select_limit = 1"],
)
def test_mariadb_settings_that_change_results(mariadb: Database, setting: str) -> None:
    """Rows are the same whatever modes and limits the server is set to."""
    name = mariadb.create("id INTEGER, k VARCHAR(9), c CHAR(5)", "(1, '', 'ab')", "(2, 'a', 'c')")
    mariadb.execute(f"SET GLOBAL {setting}")
    try:
        assert mariadb.table(name, "k").get("") == [{"id": 1, "k": "", "c": "ab"}]
        assert mariadb.table(name, "c").get("ab") == [{"id": 1, "k": "", "c": "ab"}]
        assert sorted(mariadb.table(name, "id").scan()["c"].to_pylist()) == ["ab", "c"]
    finally:
        mariadb.execute(f"SET GLOBAL {setting.partition(' ')[0]} = DEFAULT")


def test_sqlite_values_of_other_types(sqlite: Database) -> None:
    """A value that its column does not declare is an error that names the column; so is a column without a type, unless lookup.schema has it."""
    name = sqlite.create("i INTEGER, t TEXT COLLATE NOCASE, x", "(1, 'a', 1)", "('wrong', 'c', 'text')")
    with pytest.raises(SchemaError, match=r"column 'x' has no declared type .lookup.schema can declare it."):
        sqlite.table(name, "t").get("a")
    with pytest.raises(
        OptionError,
        match=r"key column 'i' cannot be compared as int32 in the database: declare it in lookup.schema as BIGINT",
    ):
        sqlite.table(name, "i", {"lookup.schema": "i INT, t STRING"})
    dated = sqlite.create("at DATETIME", "('2024-01-31 12:00:00')")
    with pytest.raises(
        OptionError, match=r"key column 'at' .*: read the table with lookup.query instead of lookup.table"
    ):
        sqlite.table(dated, "at")
    with pytest.raises(OptionError, match=r"key column 'at' .* in the database: cast the column in lookup.query"):
        sqlite.query(f"SELECT * FROM {dated}", "at")
    with pytest.raises(
        LookupFunctionError, match=r"cannot be read with option lookup.query: .*syntax error.*: check lookup.query"
    ):
        sqlite.query("selec 1", "i", ONCE).get(1)
    assert sqlite.table(name, "t", ONCE, {"lookup.columns": "t, i"}).get("a") == [{"t": "a", "i": 1}]
    table = sqlite.table(name, "t", ONCE, {"lookup.schema": "t STRING, i BIGINT"})
    assert table.get("a") == [{"t": "a", "i": 1}]
    assert table.get("A") == []
    with pytest.raises(
        LookupFunctionError,
        match=r"failed to look up key t = 'c': .*column .*'i.* has a value that is not of type int64 \(it is stored as str",
    ):
        table.get("c")
    assert sqlite.table(name, "t", ONCE, {"lookup.schema": "t STRING, x INT"}).get("a") == [{"t": "a", "x": 1}]
    name = sqlite.create("id, x", "(1, 0.1)")
    with pytest.raises(LookupFunctionError, match=r"'x'.* FLOAT|x.*float"):
        sqlite.table(name, "id", ONCE, {"lookup.schema": "id INT, x FLOAT"}).get(1)


def test_a_day_that_python_does_not_have(sqlite: Database) -> None:
    """A day that Python does not have is the key of no row, and no error."""
    name = sqlite.create("d DATE, n INTEGER", "('2024-02-29', 1)")
    days = pa.array([3_000_000, 19_782], pa.int32()).cast(pa.date32())
    assert sqlite.table(name, "d").get_many(pa.table({"d": days}))["key_index"].to_pylist() == [1]


@pytest.mark.parametrize("fixture", ["sqlite", "duckdb_file"])
def test_a_replaced_file_is_read(request: pytest.FixtureRequest, fixture: str, tmp_path: Path) -> None:
    """A file that was put in the place of the database is the database from then on, for all but the scans that have begun. In DuckDB, a
    process has one file of a path open, as far as DuckDB knows."""
    database: Database = request.getfixturevalue(fixture)
    file, old, new = Path(urllib.parse.unquote(database.url.partition(":///")[2])), tmp_path / "old", tmp_path / "new"
    name = database.create_table(pa.table({"id": range(3), "name": ["old"] * 3}))
    shutil.copy(file, old)
    database.execute(f"UPDATE {database.quoted(name)} SET name = 'new'")
    file.replace(new)
    old.replace(file)
    kind = DATABASES[database.scheme](Address.parse(database.url), None)
    version = {"lookup.version-query": f"SELECT max(name) FROM {database.quoted(name)}"}
    table = database.table(name, "id", version, PARTIAL)
    assert table.get(1)[0]["name"] == "old"
    with contextlib.closing(kind.connect()) as scanning:
        assert scanning.query("SELECT 1", 1) is not None  # so SQLite has opened the file, too
        new.replace(file)
        assert [table.get(key)[0]["name"] for key in (1, 2)] == ["new", "new"]
        rows = scanning.rows(kind.table(name), scanning.columns(kind.table(name)), None)
        assert pa.Table.from_batches(rows)["name"].to_pylist() == ["old"] * 3
    assert table.get(0)[0]["name"] == "new"


def test_servers_are_only_read(served: Database) -> None:
    """Not even a query can write."""
    statements = {
        "postgresql": ("CREATE SEQUENCE IF NOT EXISTS counter", "SELECT nextval('counter') AS id"),
        "mariadb": ("CREATE SEQUENCE IF NOT EXISTS counter", "SELECT nextval(counter) AS id"),
    }
    setup, query = statements[served.scheme]
    served.execute(setup)
    with pytest.raises(LookupFunctionError, match=r"(?i)read[- ]only transaction"):
        served.query(query, "id", ONCE).get(1)


def test_without_a_server(served: Database) -> None:
    """Lookups without a server are tried again as often as allowed, and served by one that comes back; what fails leaves nothing."""
    assert served.server is not None
    version = {"lookup.version-query": "SELECT 1"}

    def opened(retries: int, *more: Options) -> LookupTable:
        table = served.table(served.create_table(PEOPLE), "id", *more, {"lookup.max-retries": str(retries)})
        assert table.get(1)[0]["name"] == "one"
        return table

    failing, later, versioned = opened(2, PARTIAL), opened(1), opened(1, version)
    served.server.stop()
    expected = r"provider \w+://127\.0\.0\.1:\d+/\w+\S* failed to look up key id = [29] and 1 more in 3 attempts"
    with pytest.raises(LookupFunctionError, match=expected):
        failing.get_many(ids(2, 1, 9))
    assert counted(failing) == {"hitCount": 1, "missCount": 3, "loadCount": 1, "numLoadFailures": 2}
    assert failing.get(1)[0]["name"] == "one"
    with pytest.raises(LookupFunctionError, match=r"\(version\(\)\)"):
        versioned.get(1)
    served.server.start()
    assert sort_rows(later.get_many(REQUESTED)) == ANSWER  # its connection was lost
    assert later.metrics()["lookupRetryCount"] == 4
    assert sort_rows(failing.get_many(REQUESTED)) == ANSWER
    assert counted(failing) == {"hitCount": 4, "missCount": 6, "loadCount": 4, "numLoadFailures": 2}
    assert versioned.get(2)[0]["n"] == 20


@pytest.mark.nightly
def test_a_scan_that_the_server_ends(served: Database) -> None:
    """A scan that the server ends is an error: the rows that have come are not taken for all rows."""
    numbers = {"postgresql": "generate_series(1, 100000) AS s(seq)", "mariadb": "seq_1_to_100000"}[served.scheme]
    name = served.create("id INTEGER, body TEXT")
    served.execute(f"INSERT INTO {served.quoted(name)} SELECT seq, repeat('x', 500) FROM {numbers}")
    kind = DATABASES[served.scheme](Address.parse(served.url), None)
    with contextlib.closing(kind.connect()) as connection:
        batches = connection.rows(kind.table(name), connection.columns(kind.table(name)), None)
        assert 0 < next(batches).num_rows < 100_000
        assert served.server is not None
        served.server.end_connections()
        with pytest.raises((OSError, pymysql.OperationalError)):
            list(batches)


def test_a_forked_child_connects_anew(served: Database) -> None:
    """A forked child uses no connection of its parent's, and ends none."""
    name = served.create_table(PEOPLE)
    table = served.table(name, "id", {"lookup.version-query": "SELECT 1"})
    assert sort_rows(table.get_many(REQUESTED)) == ANSWER
    child = os.fork()
    if not child:
        fine = False
        with contextlib.suppress(BaseException):
            fine = sort_rows(LookupTable(served.url, served.named(name, "id")).get_many(REQUESTED)) == ANSWER
            fine &= sort_rows(table.get_many(REQUESTED)) == ANSWER
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert sort_rows(table.get_many(REQUESTED)) == ANSWER


SECRET = "hunter2 % & '"


def guarded(url: str) -> dict[str, str]:
    """A function of `lookup.credentials`."""
    assert "guarded" not in url
    return {"user": "guarded", "password": SECRET}


def broken(url: str) -> dict[str, str]:
    raise RuntimeError(f"no {SECRET}")


def test_credentials(served: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of the user's, or the environment, has the password; options, errors and descriptions never show it."""
    name, escaped = served.create_table(PEOPLE), SECRET.replace("'", "''")
    if served.scheme == "postgresql":
        served.execute(f"CREATE USER guarded PASSWORD '{escaped}'; GRANT pg_read_all_data TO guarded")
        assert isinstance(served.server, PostgresServer)
        served.server.require_passwords("guarded")
    else:
        served.execute(f"CREATE USER IF NOT EXISTS guarded@'127.0.0.1' IDENTIFIED BY '{escaped}'")
        served.execute("GRANT SELECT ON shop.* TO guarded@'127.0.0.1'")
    bare = served.url.partition("?")[0]
    options = served.named(name, "id", ONCE)
    function = {"lookup.credentials": f"{__name__}:guarded"}
    with LookupTable(bare, options | function) as table:
        assert sort_rows(table.get_many(REQUESTED)) == ANSWER
        assert "hunter2" not in repr(table) + str(table.describe())
    for variable in ("PGPASSWORD", "MYSQL_PWD"):
        monkeypatch.setenv(variable, SECRET)
    with LookupTable(f"{bare}?user=guarded", options) as table:
        assert sort_rows(table.get_many(REQUESTED)) == ANSWER
    for variable in ("PGPASSWORD", "MYSQL_PWD"):
        monkeypatch.setenv(variable, "hunter3")
    with pytest.raises(LookupFunctionError, match=r"(?i)password|denied") as caught:
        LookupTable(f"{bare}?user=guarded", options | {"lookup.columns": "id"})
    assert "hunter" not in str(caught.value)
    with pytest.raises(LookupFunctionError, match=r"lookup.credentials .* failed with RuntimeError") as caught:
        LookupTable(bare, options | {"lookup.credentials": f"{__name__}:broken"})
    assert "hunter" not in str(caught.value)


def test_the_database_leaves_out_rows(database: Database) -> None:
    """The part of lookup.where that the database can decide is in the statement, with parameters; the rest is decided here, with the same rows."""
    name = database.create_table(PEOPLE)
    count = len(database.statements())
    for where, expected in (
        ("n > 10 AND name = 'zwei'", [21]), ("name = 'zwei' OR n = 30", [21, 30]), ("name IS NULL", [30]), ("n IN (10, 20)", [10, 20]),
        ("name <> 'zwei' AND n < 30", [10, 20]), ("name LIKE 'o%'", [10]), ("n <=> 21", [21]), ("NOT n = 10", [20, 21, 30]),
    ):  # fmt: skip
        table = database.table(name, "id", {"lookup.where": where})
        assert sorted(table.scan()["n"].to_pylist()) == expected
        assert sorted(table.get_many(ids(1, 2, 3))["n"].to_pylist()) == expected
    text = " ".join(database.statements()[count:])
    assert "'zwei'" not in text or database.scheme in (
        "sqlite",
        "mariadb",
    )  # what these log has the values of parameters
    assert "IS NULL" in text


def test_the_declared_types_decide(database: Database) -> None:
    """lookup.where compares in the types of lookup.schema, whatever types the database compares in."""
    time = "DATETIME" if database.scheme == "mariadb" else "TIMESTAMP"
    name = database.create(
        f"id BIGINT, code INTEGER, day {time}",
        "(1, 2, '2024-01-02 00:00:00')", "(2, 100, NULL)", "(3, 30, '2024-01-03 00:00:00')", "(4, NULL, NULL)",
    )  # fmt: skip
    for declared, where, expected in (
        ("STRING", "code < '20'", [1, 2]), ("STRING", "code >= 'a'", []), ("STRING", "code = '100' OR code IS NULL", [2, 4]),
        ("BIGINT", "code IN (30, 3000000000)", [3]), ("BIGINT", "day = DATE'2024-01-02'", [1]), ("TINYINT", "code <= 30", [1, 3]),
        ("DECIMAL(12, 1)", "code > 30", [2]), ("DECIMAL(12, 1)", "code > 29.5", [2, 3]),
    ):  # fmt: skip
        table = database.table(
            name, "id", {"lookup.schema": f"id BIGINT, code {declared}, day DATE", "lookup.where": where}
        )
        assert sorted(table.scan()["id"].to_pylist()) == expected, where
        assert sorted(table.get_many(ids(1, 2, 3, 4))["id"].to_pylist()) == expected, where


def test_declared_types_that_do_not_fit(duckdb_file: Database) -> None:
    """A type that changes the meaning of all values is refused, and so is a value that would change."""
    name = duckdb_file.create(
        "id INTEGER, n INTEGER, t TIMESTAMP, d DATE[], s STRUCT(a INTEGER, b INTEGER)",
        "(1, 1, '2024-01-02', NULL, NULL)", "(2, 2, '2024-01-02 10:00', NULL, NULL)",
    )  # fmt: skip
    for declared, kinds in (
        ("n DATE", "int32 and cannot be read as date32"), ("t BIGINT", "timestamp.us. and cannot be read as int64"),
        ("d ARRAY<INT>", "list.* and cannot be read as list"), ("s STRUCT<b: INT, a: INT>", "struct.* and cannot be read as struct"),
    ):  # fmt: skip
        with pytest.raises(SchemaError, match=rf"is {kinds}.*, its type in lookup.schema"):
            duckdb_file.table(name, "id", {"lookup.schema": f"id INT, {declared}"})
    duckdb_file.execute(f"INSERT INTO {name} VALUES (3, 1000, NULL, NULL, {{'a': 1, 'b': 2}})")
    table = duckdb_file.table(name, "id", {"lookup.schema": "id INT, n TINYINT", "lookup.where": "n = 2"})
    assert table.scan().to_pylist() == [{"id": 2, "n": 2}]  # the condition excludes the row that does not fit
    struct = {"lookup.schema": "id INT, s STRUCT<A: INT, b: BIGINT>"}
    assert duckdb_file.table(name, "id", ONCE, struct).get(3) == [{"id": 3, "s": {"A": 1, "b": 2}}]
    for declared, value in (("n BOOLEAN", True), ("t DATE", datetime.date(2024, 1, 2))):
        table = duckdb_file.table(name, "id", ONCE, {"lookup.schema": f"id INT, {declared}"})
        assert [*table.get(1)[0].values()] == [1, value]
        with pytest.raises(LookupFunctionError, match="a value would change"):
            table.get(2)


def test_versions_that_are_no_value(database: Database) -> None:
    name = database.create_table(PEOPLE)
    for query, says in (
        ("SELECT NULL", "returned NULL"),
        ("SELECT 1 WHERE 1 = 0", "did not return a single value .rows: 0, columns: 1"),
        ("SELECT 1, 2", "did not return a single value .rows: 1, columns: 2"),
    ):
        with pytest.raises(LookupFunctionError, match=rf"lookup.version-query {says}"):
            database.table(name, "id", {"lookup.version-query": query}).get(1)


def test_a_query(database: Database) -> None:
    """A query is in the database's own SQL, with comments and semicolons at its end; its columns are its keys."""
    name = database.create_table(PEOPLE)
    sql = f"SELECT id AS code, max(name) AS name FROM {database.quoted(name)} GROUP BY id"
    declared = {"lookup.schema": "code BIGINT, name STRING"} if database.scheme == "sqlite" else {}
    ended = f"{sql} -- of people\n; /* ; */ -- ';"
    assert database.query(ended, "code", declared).get(2) == [{"code": 2, "name": "zwei"}]


@pytest.mark.parametrize(
    ("scheme", "statement", "expected"),
    [
        ("sqlite", "n>:since AND x <> ':since' AND y <> \":since\" -- :since\n OR n::since = :since_2", 1),
        ("sqlite", "x = '\\' AND n > :since", 1),
        ("mysql", "x = '\\' :since' AND y = `:since` # it's :since\n AND n > :since", 1),
        ("postgresql", "x = $$':since$$ AND y = $a$:since$$:since$a$ AND z = E'\\':since' AND n > $1 + :since", 1),
        ("duckdb", "/* :since */ :since < a AND :since < b", 2),
    ],
)
def test_where_since_is_a_parameter(scheme: str, statement: str, expected: int) -> None:
    """`:since` is a parameter outside of texts, names and comments, as the database's dialect writes them."""
    replaced, count = DATABASES[scheme].place_since(statement, "?")
    assert count == expected == statement.count(":since") - replaced.count(":since")


def test_columns_that_change(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens a table later has the columns of that time, with the rows of that time, in every mode and without a new version. What was
    opened before goes on as long as its columns are there."""
    clock = FakeClock(time.time())
    runtime = Runtime(clock.host("boot"), random.Random(1), start=in_thread)
    monkeypatch.setattr(pyspark_lookup.lookup.runtime, "_current", runtime)
    name = sqlite.create("id INTEGER, v TEXT, w INTEGER", "(1, 'a', 10)")
    modes = [{}, PARTIAL, FULL]

    def rows() -> list[list[dict[str, Any]]]:
        return [sqlite.table(name, "id", ONCE, {"lookup.version-query": "SELECT 1"}, mode).get(1) for mode in modes]

    before = [sqlite.table(name, "id", ONCE, {"lookup.version-query": "SELECT 1"}, mode) for mode in modes]
    assert rows() == [[{"id": 1, "v": "a", "w": 10}]] * 3 == [table.get(1) for table in before]
    sqlite.execute(f"ALTER TABLE {name} ADD COLUMN x TEXT DEFAULT 'x'")
    assert rows() == [[{"id": 1, "v": "a", "w": 10}]] * 3  # columns are asked for once in some seconds
    clock.tick(10)
    assert rows() == [[{"id": 1, "v": "a", "w": 10, "x": "x"}]] * 3
    assert [table.get(1) for table in before] == [[{"id": 1, "v": "a", "w": 10}]] * 3
    sqlite.execute(f"ALTER TABLE {name} DROP COLUMN w")
    clock.tick(10)
    assert rows() == [[{"id": 1, "v": "a", "x": "x"}]] * 3
    with pytest.raises(LookupFunctionError, match=r"no such column: t\.w"):
        before[0].get(1)


class AdbcSqlite(AdbcDatabase):
    """SQLite through ADBC, in the place of databases that cannot be started here."""

    module = "adbc_driver_sqlite"

    def arguments(self, login: dict[str, str]) -> dict[str, Any]:
        return {"uri": self.address.database}


def test_other_drivers_of_adbc(sqlite: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups, composite keys, scans with lookup.where, full copies and changes go through what every ADBC driver has."""
    monkeypatch.setitem(DATABASES, "snowflake", AdbcSqlite)
    database = dataclasses.replace(sqlite, url=sqlite.url.replace("sqlite:///", "snowflake://account/"))
    name = sqlite.create("id INTEGER, n INTEGER", "(1, 10)", "(2, 20)", "(2, 21)")
    assert [row["n"] for row in database.table(name, "id").get_many(ids(2, 3, 1)).to_pylist()] == [20, 21, 10]
    assert database.table(name, "id,n").get({"id": 2, "n": 21}) == [{"id": 2, "n": 21}]
    assert database.table(name, "id", {"lookup.where": "n > 10 AND id = 2"}).scan()["n"].to_pylist() == [20, 21]
    full = {"lookup.cache": "FULL", "lookup.version-query": f"SELECT max(n) FROM {name}"}
    table = database.table(name, "id", full, {"lookup.changes-query": f"SELECT id FROM {name} WHERE n > :since"})
    assert len(table.get(2)) == 2
    sqlite.execute(f"INSERT INTO {name} VALUES (3, 30)")
    assert table.get(3) == [{"id": 3, "n": 30}]
    assert table.metrics()["changedKeyCount"] == 1


def test_how_other_drivers_are_connected() -> None:
    """The URLs of SQLAlchemy become what the drivers' documentation says."""
    login = {"user": "a b", "password": "p@/"}
    address = Address.parse("snowflake://account.region/db/schema?warehouse=w&user=x")
    assert Snowflake(address, None).arguments(login) == {"uri": "a%20b:p%40%2F@account.region/db/schema?warehouse=w"}
    options = {"adbc.bigquery.sql.project_id": "project", "adbc.bigquery.sql.dataset_id": "dataset"}
    assert Bigquery(Address.parse("bigquery://project/dataset"), None).arguments({}) == {"db_kwargs": options}
    flight = FlightSql(Address.parse("flightsql://host:31337"), None)
    local = FlightSql(Address.parse("flightsql://[::1]:31337?tls=false"), None)
    assert local.arguments({})["uri"] == "grpc://[::1]:31337"
    assert local.address.place == "flightsql://[::1]:31337/"
    assert flight.arguments(login) == {
        "uri": "grpc+tls://host:31337",
        "db_kwargs": {"username": "a b", "password": "p@/"},
    }


def test_a_driver_that_is_missing(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra that installs it."""
    options = {"lookup.table": "t", "lookup.keys": "id", "lookup.cache.dir": str(cache_dir)}
    for url, module, extra in (
        ("postgresql://db/shop", "adbc_driver_postgresql", "postgres"), ("mysql://db/shop", "pymysql", "mysql"),
        ("duckdb:///shop.duckdb", "duckdb", "duckdb"), ("snowflake://account/db", "adbc_driver_snowflake", "snowflake"),
    ):  # fmt: skip
        with (
            monkeypatch.context() as patched,
            pytest.raises(OptionError, match=rf"pip install 'pyspark-lookup\[{extra}\]'"),
        ):
            patched.setitem(sys.modules, module, None)
            LookupTable(url, options)


REFUSED = [
    ("postgresql://reader:hunter2@db/shop", {}, r"postgresql URL with a password"),
    ("postgresql://db/shop?password=hunter2", {}, r"postgresql URL with a password"),
    ("sqlite:///x.db?key=hunter2", {}, r"sqlite URL with a password"),
    ("sqlite://", {}, r"names no SQLite file"),
    ("sqlite:///x.db?mode=rw", {}, r"unknown parameter 'mode' in the sqlite URL"),
    ("s3://bucket/x", {}, r"lookup.table is for databases: set path to the URL of one"),
    ("postgresql://db/shop", {"lookup.query": "SELECT 1"}, r"give only one of them"),
    ("postgresql://db/shop", {"lookup.changes-query": "SELECT 1"}, r"needs lookup.version-query"),
    ("postgresql://db/shop", {"lookup.version-query": "SELECT 1", "lookup.changes-query": "SELECT ':since'"}, r"has no :since"),
    ("mysql://db", {}, r"names no database: write mysql://host/database"),
    ("mariadb://db/shop?charset=latin1", {}, r"unknown parameter 'charset' in the mariadb URL: remove it .known parameters: ssl_ca"),
    ("sqlite:///x.db", {"lookup.table": '"a'}, r"a quote \(\"\) is never closed"),
    ("sqlite:///x.db", {"lookup.table": "a..b"}, r"expected table or schema.table"),
    ("postgresql://reader:12/hunter2@db/shop", {}, r"postgresql URL with # or with @ after its host: .* leave out a password"),
    ("mysql://reader:12#hunter2@db/shop", {}, r"mysql URL with # or with @ after its host"),
    ("sqlite:///a#b.db", {}, r"sqlite URL with # .*: write them as %23"),
    ("mysql://::1/shop", {}, r"cannot be parsed: .* an IPv6 address in brackets"),
    ("mysql://%2Frun%2Fmysqld.sock/shop", {}, r"has a file in the place of the host: write mysql:///database\?unix_socket="),
    ("sqlite:///x.db", {"lookup.credentials": "no function"}, r"lookup.credentials = '\[redacted\]' .* expected module:function"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "more", "says"), REFUSED)
def test_options_that_are_refused(cache_dir: Path, url: str, more: Options, says: str) -> None:
    """Options are refused with the cure, before anything is connected to, and without the password."""
    with pytest.raises((OptionError, LookupFunctionError), match=says) as caught:
        LookupTable(url, {"lookup.table": "customers", "lookup.keys": "id", "lookup.cache.dir": str(cache_dir), **more})
    assert "hunter2" not in str(caught.value)


@needs(DATA_SOURCES)
@pytest.mark.spark
@pytest.mark.parametrize("database", by_day(["postgres", "mariadb", "sqlite", "duckdb_file"], 4), indirect=True)
def test_through_spark(spark: SparkSession, database: Database) -> None:
    """A read, a SELECT from a catalog's table and a join have the rows; a later query of cached keys loads none again."""
    before = len(database.statements())
    name = database.create_table(PEOPLE)
    options = {"path": database.url} | database.named(name, "id", PARTIAL)
    df = spark.read.format("lookupcache").options(**options).option("lookup.where", "id IN (1, 2)").load()
    for _ in range(2):
        assert sorted(map(tuple, df.collect())) == [(1, "one", 10), (2, "two", 20), (2, "zwei", 21)]
    if database.server is not None:  # it has what Spark's workers sent
        condition = " = ANY (" if database.scheme == "postgresql" else " IN ("
        assert len([text for text in database.statements()[before:] if condition in text]) == 1
    clause = ", ".join(f"`{key}` '{value}'" for key, value in options.items())
    spark.sql(f"CREATE TABLE provided USING lookupcache OPTIONS ({clause})")
    try:
        rows = spark.sql("SELECT name FROM provided WITH (`lookup.where` = 'id = 2') ORDER BY name").collect()
        assert [row.name for row in rows] == ["two", "zwei"]
    finally:
        spark.sql("DROP TABLE provided")
    uncached = {key: text for key, text in options.items() if key != "path" and key not in PARTIAL}
    orders = spark.createDataFrame([(7, 1), (8, 3), (9, 5)], "order_id INT, customer_id BIGINT")
    joined = lookup_join(orders, database.url, on={"customer_id": "id"}, options=uncached)
    assert sorted((row.order_id, row.n) for row in joined.collect()) == [(7, 10), (8, 30), (9, None)]
    everything = spark.read.format("lookupcache").options(**uncached).load(database.url)
    assert everything.where("n >= 21").count() == 2


OVER_CONNECT = """
import sys
from pyspark_lookup import lookup_join, register_lookup
url, cache = sys.argv[1:]
spark = connect.getOrCreate()
options = {"lookup.table": "people", "lookup.keys": "id", "lookup.cache.dir": cache}
print("SCAN", spark.read.format("lookupcache").options(**options).load(url).count())
joined = lookup_join(spark.range(4), url, on="id", options=options)
print("JOIN", sorted(row.n for row in joined.collect() if row.n))
register_lookup(spark, "person", url, "id", options=options)
print("FUNCTION", spark.sql("SELECT person(1).name AS name").first().name)
"""


@needs(DATA_SOURCES)
@pytest.mark.nightly
@pytest.mark.spark
@pytest.mark.timeout(560)  # most of it is the start of a server
def test_over_connect(served: Database, tmp_path: Path, cache_dir: Path) -> None:
    """A client of Spark Connect scans, joins and calls functions."""
    served.execute("DROP TABLE IF EXISTS people")
    served.execute("CREATE TABLE people (id BIGINT, name VARCHAR(9), n INTEGER)")
    served.execute("INSERT INTO people VALUES (1, 'one', 10), (3, 'three', 30)")
    lines = run_script(tmp_path, CONNECT + OVER_CONNECT, served.url, cache_dir, timeout_s=500)
    assert lines == ["SCAN 2", "JOIN [10, 30]", "FUNCTION one"]


@needs(DATA_SOURCES)
@pytest.mark.nightly
@pytest.mark.spark
def test_a_stream_survives_its_server(spark: SparkSession, served: Database, tmp_path: Path) -> None:
    """The server is killed in the middle of a micro-batch and comes back: no row is wrong, and the stream goes on."""
    assert served.server is not None
    name = served.create_table(PEOPLE.set_column(0, "id", pa.array([1, 2, 4, 3])))
    for number in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.json").write_text(f'{{"id": {number + 1}}}')
    orders = spark.readStream.schema("id INT").option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    options = served.named(name, "id", {"lookup.max-retries": "20", "lookup.version-query": "SELECT 1"})
    joined = lookup_join(orders, served.url, on="id", options=options)
    batches, restarts = list[list[tuple[int, int]]](), list[threading.Timer]()

    def take(batch: DataFrame, number: int) -> None:
        if number == 1:  # this batch has been planned, and has not asked yet
            assert served.server is not None
            served.server.stop()
            restarts.append(threading.Timer(2, served.server.start))
            restarts[0].start()
        batches.append([(row.id, row.n) for row in batch.collect()])

    query = joined.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "state")).start()
    try:
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
        for restart in restarts:
            restart.join()
    assert sorted(row for batch in batches for row in batch) == [(1, 10), (2, 20), (3, 30), (4, 21)]
