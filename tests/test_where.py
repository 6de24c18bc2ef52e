"""`lookup.where`: what a predicate's text means, and every construct that is refused with its text."""

from __future__ import annotations

import datetime
import math
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.base.errors import OptionError, PredicateError
from pyspark_lookup.columnar.binding import bind_in
from pyspark_lookup.columnar.predicate import (
    And,
    Compare,
    Constant,
    In,
    IsNull,
    NullSafeEqual,
    Or,
    Predicate,
    StartsWith,
)
from pyspark_lookup.columnar.sql_predicate import parse_where
from tests.fuzzing import MORE

UTC = datetime.timezone.utc
SCHEMA = pa.schema(
    [
        ("id", pa.int32()), ("big", pa.int64()), ("name", pa.string()), ("flag", pa.bool_()), ("amount", pa.decimal128(10, 2)),
        ("single", pa.float32()), ("double", pa.float64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("clock", pa.timestamp("us")),
        ("bytes", pa.binary()), ("pair", pa.struct([("x", pa.int32())])), ("list", pa.list_(pa.field("element", pa.int32()))),
        ("elapsed", pa.duration("us")), *((name, pa.int32()) for name in ("Spaced Name", "dotted.name", "tick`ed", "größe")),
    ]
)  # fmt: skip
NOON = datetime.datetime(2024, 1, 31, 12)
ID_1, ID_2 = Compare("id", "=", 1), Compare("id", "=", 2)


FLAG = Compare("flag", "=", True)
AT_NOON = Compare("at", "=", NOON.replace(tzinfo=UTC))
MEANINGS: list[tuple[Predicate, list[str]]] = [
    # comparisons
    (ID_1, ["id = 1", "(id) = (1)", "id = 1 -- a comment", "id /* ) */ = 1", "ID = 1", "`id` = 1"]),
    (Compare("id", "<>", 1), ["id <> 1", "id != 1", "1 <> id", "! id = 1"]),
    (Compare("id", ">", 1), ["1 < id", "id > 1.5"]),
    (Compare("id", "<=", 1), ["1 >= id"]),
    (Compare("id", ">=", 1), ["1 <= id"]),
    (Compare("id", "<", 1), ["1 > id"]),
    (Constant(None), ["id = NULL", "name LIKE NULL", "NULL", "NOT NULL", "id = CAST(NULL AS INT)"]),
    (NullSafeEqual("id", 1), ["1 <=> id", "id IS NOT DISTINCT FROM 1"]),
    (Constant(False), ["id <=> 1.5"]),
    (Constant(True), ["NOT id <=> 1.5", "true", "NOT FALSE"]),
    # lists, ranges, prefixes, nulls
    (In("id", (1,), True), ["id IN (1, NULL)", "id IN (1, 3000000000, 2.5, 1, NULL)"]),
    (In("big", (float(2**53), 1.0), False), ["big IN (9007199254740993, 1e0)"]),
    (In("name", ("a", "b"), False), ["name IN ('a', 'b', 'a')"]),
    (In("id", (1, 2), False, negated=True), ["id NOT IN (1, 2)", "NOT id IN (1, 2)"]),
    (And((Compare("id", ">=", 1), Compare("id", "<=", 2))), ["id BETWEEN 1 AND 2"]),
    (Or((Compare("id", "<", 1), Compare("id", ">", 2))), ["id NOT BETWEEN 1 AND 2"]),
    (And((Constant(None), Compare("id", "<=", 2))), ["id BETWEEN NULL AND 2"]),
    (StartsWith("name", "ab"), ["name LIKE 'ab%'", "NOT name NOT LIKE 'ab%'"]),
    (StartsWith("name", ""), ["name LIKE '%'"]),
    (StartsWith("name", "é\U0001f600"), ["name LIKE 'é\U0001f600%'"]),
    (StartsWith("name", "ab", negated=True), ["name NOT LIKE 'ab%'", "NOT name LIKE 'ab%'"]),
    (IsNull("id"), ["id <=> NULL", "NOT id IS NOT NULL"]),
    (IsNull("id", negated=True), ["id IS NOT NULL"]),
    (IsNull("pair"), ["pair IS NULL"]),
    # combinations
    (Or((ID_1, And((ID_2, FLAG)))), ["id = 1 OR id = 2 AND flag"]),
    (And((Or((ID_1, ID_2)), FLAG)), ["(id = 1 OR id = 2) AND flag"]),
    (And((ID_1, ID_2, FLAG)), ["id = 1 AND id = 2 AND flag"]),
    (And((ID_1, And((ID_2, FLAG)))), ["id = 1 AND (id = 2 AND flag)"]),
    (Or((Compare("id", "<>", 1), ID_2)), ["NOT (id = 1 AND NOT id = 2)", "NOT id = 1 OR id = 2"]),
    (Compare("flag", "<>", True), ["NOT flag"]),
    (Compare("flag", ">", False), ["flag > false"]),
    # names
    (Compare("Spaced Name", "=", 1), ["`spaced name` = 1"]),
    (Compare("dotted.name", "=", 1), ["`dotted.name` = 1"]),
    (Compare("tick`ed", "=", 1), ["`tick``ed` = 1"]),
    (Compare("größe", "=", 1), ["größe = 1"]),
    (Or((IsNull("größe"), IsNull("größe"))), ["GRÖSSE IS NULL OR `GRÖßE` IS NULL"]),
    # numbers
    (ID_1, ["id = - -1", "id = +1", "id = 1L", "id = 1S", "id = 1Y", "id = 1.0", "id = CAST('1' AS INT)"]),
    (Compare("id", "<=", 2), ["id < 2.5"]),
    (Constant(False, "id"), ["id = 1.5", "id = 99999999999999999999", "id = 3000000000.0"]),
    (Constant(True, "id"), ["id < 3000000000", "id > -3000000000", "id <> 2.5"]),
    (Constant(True), ["id < 3000000000.0"]),  # true of null as well: Spark's DecimalPrecision
    (Constant(False), ["big >= 9223372036854775808"]),
    (Compare("id", "=", 1.0), ["id = 1e0"]),
    (Compare("big", "=", -(2**63)), ["big = -9223372036854775808"]),
    (Compare("big", "=", 2**63 - 1), ["big = 9223372036854775807"]),
    (Compare("amount", "=", Decimal("1.5")), ["amount = CAST('1.5' AS DECIMAL(3, 1))"]),
    (Compare("amount", "=", Decimal("0.5")), ["amount = .5"]),
    (Compare("amount", "=", Decimal(5)), ["amount = 5."]),
    (Compare("amount", "=", 1.5), ["amount = 1.5D"]),
    (Compare("amount", "<=", Decimal("-0.01")), ["amount < -0.005"]),
    (Constant(False, "amount"), ["amount < -99999999999999999999999999.999", "amount > 100000000"]),
    (Compare("double", "=", 0.001), ["double = 1e-3"]),
    (Compare("double", "=", 0.10000000149011612), ["double = 0.1F"]),
    (Compare("single", "=", 0.10000000149011612), ["single = CAST('0.1' AS FLOAT)"]),
    (Compare("double", "=", -math.inf), ["double = CAST('-Infinity' AS DOUBLE)"]),
    (Compare("double", "=", 1.0), ["double = CAST(1 AS DOUBLE)"]),
    # text and bytes
    (Compare("name", "=", "a"), ['name = "a"']),
    (Compare("name", "=", "it's"), [r"name = 'it\'s'"]),
    (Compare("name", "=", "a\\b\n\t\r\b\\%\\_"), [r"name = 'a\\b\n\t\r\b\%\_'"]),
    (Compare("name", "=", "id = 1) OR (1 = 1"), ["name = 'id = 1) OR (1 = 1'"]),
    (Compare("bytes", "=", b""), ["bytes = X''"]),
    (Compare("bytes", "=", b"\x0f"), ["bytes = X'F'"]),
    # times
    (Compare("day", "=", NOON.date()), ["day = '2024-01-31'", "day = DATE '2024-01-31'"]),
    (Compare("day", "<", NOON.date()), ["day < CAST('2024-01-31' AS DATE)"]),
    (Compare("clock", "=", NOON), ["clock = '2024-01-31 12:00:00'", "clock = TIMESTAMP_NTZ '2024-01-31T12:00:00'"]),
    (Compare("clock", ">=", NOON.replace(hour=0)), ["clock >= DATE '2024-01-31'", "clock >= '2024-01-31'"]),
    (Compare("clock", "<", NOON.replace(minute=30)), ["clock < '2024-01-31 12:30'"]),
    (Compare("clock", "<", NOON.replace(second=45, microsecond=500_000)), ["clock < ' 2024-01-31T12:00:45.5 '"]),
    (Compare("at", "<", NOON.replace(microsecond=1, tzinfo=UTC)), ["at < '2024-01-31 12:00:00.000001Z'"]),
    (AT_NOON, ["at = '2024-01-31 12:00:00+00:00'", "at = TIMESTAMP '2024-01-31 13:00:00+01:00'"]),
    (AT_NOON, ["at = TIMESTAMP '2024-01-31 12:00:00 UTC'", "at = TIMESTAMP_LTZ '2024-01-31 12:00:00Z'"]),
    # Thousands of values or alternatives are no depth.
    (In("id", tuple(range(5000)), False), [f"id IN ({', '.join(map(str, range(5000)))})"]),
    (Or(tuple(Compare("id", "=", n) for n in range(2000))), [" OR ".join(f"id = {n}" for n in range(2000))]),
]


def test_supported_constructs() -> None:
    """Each construct means one predicate over the table's columns. (Of the plain ones test_same_rows asks Spark itself.)"""
    for expected, texts in MEANINGS:
        for text in texts:
            assert parse_where(text, SCHEMA) == expected, text[:100]


REFUSED: dict[str, list[str]] = {
    # column against column, expressions, functions
    "{text}": [
        "1 = 1", "id + 1 = 2", "id % 2 = 1", "-id = 1", "name || 'x' = 'ax'", "CAST(id AS STRING) = '1'", "id LIKE '1%'", "name ILIKE 'a%'",
        "name RLIKE 'a'", "flag IS TRUE", "id IS DISTINCT FROM 1", "id IN (SELECT 1)",
    ],
    "'big'": ["id = big", "id IN (big)"],
    "'1 + 1'": ["id = 1 + 1"],
    "\"LOWER(name) = 'a'\"": ["lower(name) = 'a'"],
    "'pair.x'": ["pair.x = 1"],
    "'t.id'": ["t.id = 1"],
    "'CURRENT_DATE": ["day = current_date()"],
    "INTERVAL": ["day > DATE '2024-01-31' - INTERVAL 1 DAY"],
    "+ 1": ["day = DATE '2024-01-31' + 1"],
    "'COALESCE(flag, TRUE)'": ["coalesce(flag, true)"],
    "CASE WHEN flag": ["CASE WHEN flag THEN true ELSE false END"],
    "'IF(flag, 1, 2)'": ["id = IF(flag, 1, 2)"],
    "name, 'a'": ["startswith(name, 'a')"],
    # other predicates
    "\"name LIKE '%a'\": LIKE takes a prefix only": ["name LIKE '%a'"],
    "LIKE takes a prefix only": ["name LIKE 'a'", "name LIKE 'a_c%'", "name LIKE 'a%c%'", r"name LIKE 'a\\_c%'"],
    "ESCAPE": ["name LIKE 'a/_%' ESCAPE '/'"],
    "ANY ('a%', 'b%')": ["name LIKE ANY ('a%', 'b%')"],
    "'name'": ["name LIKE name"],
    "flag IS FALSE": ["flag IS NOT FALSE"],
    "id BETWEEN": ["id BETWEEN SYMMETRIC 2 AND 1"],
    "'id = 1 = TRUE'": ["id = 1 = true"],
    "'id = 1'": ["(id = 1) IS NULL"],
    "'(id, big)'": ["(id, big) IN ((1, 2))"],
    "'EXISTS(SELECT 1)'": ["EXISTS (SELECT 1)"],
    "'(SELECT 1)'": ["id = (SELECT 1)"],
    "ARRAY_CONTAINS(pair, 1)": ["array_contains(pair, 1)"],
    # literals
    "'id = 1 AS big'": ["id = 1 big"],
    "'?'": ["id = ?"],
    "':one'": ["id = :one"],
    "'CAST(500 AS TINYINT)'": ["id = 500Y"],
    "{literal}": [
        "id = CAST(1.5 AS INT)", "id = CAST('x' AS INT)", "id = CAST('1_0' AS INT)", "id = TRY_CAST('x' AS INT)",
        "amount = CAST(1.5 AS DECIMAL)", "double = CAST('1_0' AS DOUBLE)", "double = 1e400", f"id = {'123456789' * 4}012",
        "name = CAST(1 AS STRING)", "name = 'a' COLLATE UTF8_LCASE",
    ],
    "AS DECIMAL(5, 2))": ["amount = CAST('NaN' AS DECIMAL(5, 2))"],
    "'a'": ["name = 'a' 'b'"],
    "'it'": ["name = 'it''s'"],  # the Spark of today and the one before differ on it
    "AS DATE)": ["day = CAST('2024-01-31 12:00:00' AS DATE)"],
    "'noon'": ["clock = TIMESTAMP 'noon'"],
}  # fmt: skip


NUMBER = "column 'id' of type int32 cannot be compared with "
TEXT = "column 'name' of type string cannot be compared with "
ZONED = "as a timestamp with its zone"
MISFITS: dict[str, list[str]] = {
    NUMBER + "'1'": ["id = '1'"],
    NUMBER + "True": ["id"],
    "column 'double' of type double cannot be compared with 'NaN'": ["double = 'NaN'"],
    TEXT + "1; quote it: '1'": ["name = 1"],
    TEXT + "'2024-01-31'; quote it: '2024": ["name = DATE '2024-01-31'"],
    TEXT + "'2024-01-31 12:00:00": ["name = TIMESTAMP '2024-01-31 12:00:00'"],
    "cannot be compared with '2024-01-31 00:00:00'": ["day = TIMESTAMP '2024-01-31 00:00:00'"],
    "column 'flag' of type bool cannot be compared with 1": ["flag = 1"],
    "column 'bytes' of type binary cannot be compared with 'a'": ["bytes = 'a'"],
    "column 'pair' of type struct<x: int32> cannot be compared with 1": ["pair = 1"],
    "column 'list' of type list<element: int32> cannot be compared with 1": ["list = 1"],
    "column 'elapsed' of type duration[us] cannot be compared with 1": ["elapsed = 1"],
    "'x' is no date32[day] value for column 'day'": ["day IN ('2024-01-31', 'x')"],
    "is no date32[day] value": ["day = '31.1.2024'", "day = '20240131'", "day = '2024-02-30'"],
    f"give '2024-01-31 12:00:00' for column 'at' {ZONED}": ["at = '2024-01-31 12:00:00'"],
    ZONED + ", e.g.": ["at = DATE '2024-01-31'"],
    ZONED: ["at IN ('0001-01-01 00:00:00+01:00')", "at = '9999-12-31 23:59:59-01:00'", "at = TIMESTAMP '2024-01-31 12:00:00'"],
    "as a timestamp without a zone, e.g.": ["clock = '2024-01-31 12:00:00Z'"],
    "'noon' is no timestamp[us] value": ["clock = 'noon'"],
    "Spark would round column 'big' of type int64 or 1.0000000000000000001": ["big = 1.0000000000000000001"],
    "option lookup.where: the table has no column 'unknown'; it has id, big, name": ["unknown = 1"],
    "has no column 't.id'": ["`t.id` = 1"],
    # What Spark reads otherwise, or some Python does not read, is no time.
    **{f"for column '{column}'": [f"{column} = '{text}'" for text in (
        "", "2024", "2024-1-31", "20240131", "2024-W05-3", "2024-01-31 25:00", "2024-01-31 12:00:00.1234567", "2024-01-31+01:00",
        "2024-01-31 12:00 Europe/Paris", "٢٠٢٤-٠١-٣١", "2024-01-31 12:00:00.5.5",
    )] for column in ("day", "clock", "at")},
    # An escape that some sqlglot leaves as it is would compare another text than Spark's.
    "is not supported; write the character itself": [
        f"name = 'a{escape}b'" for escape in (r"\u00e9", r"\U0001F600", r"\101", r"\0", r"\Z", r"\q", r"\"", "\\\n")
    ],
    # No predicate, more than one, or too deep.
    "{start}": [
        "id =", "= 1", "id = 1 AND", "id = 1)", "(id = 1", "id = 'a", "WHERE id = 1", "id = 1; id = 2", "id = 1) OR (id = 2",
        "id = 1) AND id = 2 OR (id = 3", "id = 1 GROUP BY id", "id = 1) LIMIT (1", "id = 1) UNION ALL SELECT (1", "SELECT 1", "id, big",
        "-- nothing", "id NOT NOT", "id = `", "(" * 3000 + "id = 1" + ")" * 3000, "NOT " * 3000 + "flag",
    ],
}  # fmt: skip


@pytest.mark.parametrize("part", [*REFUSED, *MISFITS])
def test_what_is_refused(part: str) -> None:
    """What cannot be answered exactly as Spark would is an error that shows it; of a literal that does not fit also column and type."""
    for text in REFUSED.get(part, MISFITS.get(part, [])):
        with pytest.raises(PredicateError, match=r"option lookup\.where") as caught:
            parse_where(text, SCHEMA)
        assert isinstance(caught.value, OptionError)
        message = str(caught.value)
        assert part.format(text=text, literal=text.partition(" = ")[2], start=text[:20]) in message
        if part in REFUSED:
            assert message.startswith("option lookup.where: ")
            assert "is not supported; supported are =, <>," in message or "LIKE takes a prefix only" in message


def test_big_decimal_literals() -> None:
    """`1.5BD` is the number it says; a sqlglot that reads it as DECIMAL without digits has it refused."""
    try:
        found = parse_where("amount = 1.5BD", SCHEMA)
    except PredicateError as refused:
        assert "CAST(1.5 AS DECIMAL)" in str(refused)
    else:
        assert found == Compare("amount", "=", Decimal("1.5"))


TEXTS = st.text(st.sampled_from("\\'\"%_uUZq0\n") | st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=300 * MORE, deadline=None, derandomize=True)
@given(TEXTS)
def test_any_text_can_be_quoted(text: str) -> None:
    """With backslashes before quotes and backslashes, a literal is any text; so is a LIKE prefix without wildcards."""
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    assert parse_where(f"name = {quoted}", SCHEMA) == Compare("name", "=", text)
    assert parse_where(f"name IN ({quoted}, NULL)", SCHEMA) == bind_in(SCHEMA.field("name"), [text, None])
    if not set(text) & set("%_\\"):
        assert parse_where(f"name LIKE {quoted[:-1]}%'", SCHEMA) == StartsWith("name", text)


def test_scan_adds_its_predicate_to_the_tables(tmp_path: Path) -> None:
    """`LookupTable.scan(predicate=…)` narrows lookup.where, whatever OR and comment either holds."""
    pq.write_table(pa.table({"id": range(10), "flag": [True, False] * 5}), tmp_path / "t.parquet")
    table = LookupTable(str(tmp_path / "t.parquet"), {"lookup.where": "id = 1 OR id = 2 -- two of them"})
    assert table.scan()["id"].to_pylist() == [1, 2]
    assert table.scan(predicate="flag OR id = 9 -- or the last")["id"].to_pylist() == [2]
