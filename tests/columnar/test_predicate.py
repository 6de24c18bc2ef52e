"""Predicates: what `lookup.where` means, and every construct that is refused; answers beside a slow oracle of Spark's, and statistics."""

import datetime
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.columnar.predicate import (
    Among,
    And,
    ColumnStats,
    Compare,
    Constant,
    In,
    IsNull,
    NullSafeEqual,
    Or,
    Predicate,
    StartsWith,
    StatsColumns,
    evaluate,
    may_match,
    may_match_files,
    negate,
    referenced_columns,
)
from pyspark_lookup.columnar.sql_predicate import bind_compare, bind_in, parse_where
from pyspark_lookup.errors import OptionError, PredicateError
from tests.support.fuzzing import MORE

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
    (ID_1, ["id = 1", "(id) = (1)", "id = 1 -- a comment", "id /* ) */ = 1", "ID = 1", "`id` = 1"]),
    (Compare("id", "<>", 1), ["id <> 1", "id != 1", "1 <> id", "! id = 1"]),
    (Compare("id", ">", 1), ["1 < id", "id > 1.5"]),
    (Constant(None), ["id = NULL", "name LIKE NULL", "NULL", "NOT NULL", "id = CAST(NULL AS INT)"]),
    (NullSafeEqual("id", 1), ["1 <=> id", "id IS NOT DISTINCT FROM 1"]),
    (Constant(False), ["id <=> 1.5"]),
    (Constant(True), ["NOT id <=> 1.5", "true", "NOT FALSE"]),
    (In("id", (1,), True), ["id IN (1, NULL)", "id IN (1, 3000000000, 2.5, 1, NULL)"]),
    (In("big", (float(2**53), 1.0), False), ["big IN (9007199254740993, 1e0)"]),
    (In("id", (1, 2), False, negated=True), ["id NOT IN (1, 2)", "NOT id IN (1, 2)"]),
    (And((Constant(None), Compare("id", "<=", 2))), ["id BETWEEN NULL AND 2"]),
    (StartsWith("name", "ab"), ["name LIKE 'ab%'", "NOT name NOT LIKE 'ab%'"]),
    (StartsWith("name", "é\U0001f600"), ["name LIKE 'é\U0001f600%'"]),
    (IsNull("id"), ["id <=> NULL", "NOT id IS NOT NULL"]),
    (Or((ID_1, And((ID_2, FLAG)))), ["id = 1 OR id = 2 AND flag"]),
    (And((Or((ID_1, ID_2)), FLAG)), ["(id = 1 OR id = 2) AND flag"]),
    (And((ID_1, And((ID_2, FLAG)))), ["id = 1 AND (id = 2 AND flag)"]),
    (Or((Compare("id", "<>", 1), ID_2)), ["NOT (id = 1 AND NOT id = 2)", "NOT id = 1 OR id = 2"]),
    (Compare("Spaced Name", "=", 1), ["`spaced name` = 1"]),
    (Compare("tick`ed", "=", 1), ["`tick``ed` = 1"]),
    (Compare("größe", "=", 1), ["größe = 1"]),
    (Or((IsNull("größe"), IsNull("größe"))), ["GrößE IS NULL OR `GRÖßE` IS NULL"]),
    (ID_1, ["id = - -1", "id = +1", "id = 1L", "id = 1S", "id = 1Y", "id = 1.0", "id = CAST('1' AS INT)"]),
    (Compare("id", "<=", 2), ["id < 2.5"]),
    (Constant(False, "id"), ["id = 1.5", "id = 99999999999999999999", "id = 3000000000.0"]),
    (Constant(True, "id"), ["id < 3000000000", "id < 3000000000.0", "id > -3000000000", "id <> 2.5"]),
    (
        Constant(False),
        ["big >= 9223372036854775808", "id >= 9223372036854775808.5"],
    ),  # of null as well: Spark's DecimalPrecision
    (Compare("big", "=", -(2**63)), ["big = -9223372036854775808"]),
    (Compare("amount", "=", Decimal("1.5")), ["amount = CAST('1.5' AS DECIMAL(3, 1))"]),
    (Compare("amount", "=", Decimal("0.5")), ["amount = .5"]),
    (Compare("amount", "<=", Decimal("-0.01")), ["amount < -0.005"]),
    (Constant(False, "amount"), ["amount < -99999999999999999999999999.999", "amount > 100000000"]),
    (Compare("double", "=", 0.10000000149011612), ["double = 0.1F"]),
    (Compare("double", "=", -math.inf), ["double = CAST('-Infinity' AS DOUBLE)"]),
    (Compare("name", "=", "id = 1) OR (1 = 1"), ["name = 'id = 1) OR (1 = 1'"]),
    (Compare("bytes", "=", b""), ["bytes = X''"]),
    (Compare("bytes", "=", b"\x0f"), ["bytes = X'F'"]),
    (Compare("day", "=", NOON.date()), ["day = '2024-01-31'", "day = DATE '2024-01-31'"]),
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


# By what the error shows: all of the text, its literal, or a part of it.
REFUSED: dict[str, list[str]] = {
    "{text}": [
        "1 = 1", "id + 1 = 2", "id % 2 = 1", "-id = 1", "name || 'x' = 'ax'", "CAST(id AS STRING) = '1'", "id LIKE '1%'", "name ILIKE 'a%'",
        "name RLIKE 'a'", "flag IS TRUE", "id IS DISTINCT FROM 1", "id IN (SELECT 1)",
    ],
    "{literal}": [
        "id = CAST(1.5 AS INT)", "id = CAST('x' AS INT)", "id = CAST('1_0' AS INT)", "id = TRY_CAST('x' AS INT)",
        "amount = CAST(1.5 AS DECIMAL)", "double = CAST('1_0' AS DOUBLE)", "double = 1e400", f"id = {'123456789' * 4}012",
        "name = CAST(1 AS STRING)", "name = 'a' COLLATE UTF8_LCASE",
    ],
    "": [
        "id = big", "id IN (big)", "id = 1 + 1", "lower(name) = 'a'", "pair.x = 1", "t.id = 1", "day > DATE '2024-01-31' - INTERVAL 1 DAY",
        "day = current_date()", "day = DATE '2024-01-31' + 1", "coalesce(flag, true)", "CASE WHEN flag THEN true ELSE false END",
        "id = IF(flag, 1, 2)", "startswith(name, 'a')", "name LIKE 'a/_%' ESCAPE '/'", "name LIKE ANY ('a%', 'b%')", "name LIKE name",
        "flag IS NOT FALSE", "id BETWEEN SYMMETRIC 2 AND 1", "id = 1 = true", "(id = 1) IS NULL", "(id, big) IN ((1, 2))", "id = (SELECT 1)",
        "EXISTS (SELECT 1)", "array_contains(pair, 1)", "id = 1 big", "id = :one", "amount = CAST('NaN' AS DECIMAL(5, 2))",
        "day = CAST('2024-01-31 12:00:00' AS DATE)", "clock = TIMESTAMP 'noon'",
    ],
    "'?'": ["id = ?"],
    "'CAST(500 AS TINYINT)'": ["id = 500Y"],
    "LIKE takes a prefix only": ["name LIKE '%a'", "name LIKE 'a'", "name LIKE 'a_c%'", "name LIKE 'a%c%'", r"name LIKE 'a\\_c%'"],
}  # fmt: skip
WORD = re.compile(r"\w+")
ZONED = "as a timestamp with its zone"
MISFITS: dict[str, list[str]] = {
    "column '{column}' of type {kind} cannot be compared with {literal}: compare it with a literal of its type": [
        "id = '1'", "double = 'NaN'", "flag = 1", "bytes = 'a'", "pair = 1", "list = 1", "elapsed = 1",
    ],
    "column 'id' of type int32 cannot be compared with True": ["id"],
    "column 'name' of type string cannot be compared with {literal}: quote it: '1'": ["name = 1"],
    "column 'name' of type string cannot be compared with '2024-01-31": ["name = DATE '2024-01-31'", "name = TIMESTAMP '2024-01-31 12:00:00'"],
    "cannot be compared with '2024-01-31 00:00:00'": ["day = TIMESTAMP '2024-01-31 00:00:00'"],
    "'x' is not a valid date32[day] value for column 'day'": ["day IN ('2024-01-31', 'x')"],
    "is not a valid date32[day] value": ["day = '31.1.2024'", "day = '20240131'", "day = '2024-02-30'"],
    f"give '2024-01-31 12:00:00' for column 'at' {ZONED}": ["at = '2024-01-31 12:00:00'"],
    ZONED + ", e.g.": ["at = DATE '2024-01-31'"],
    "{literal} for column 'at' is outside the years 1 to 9999 in UTC": ["at IN ('0001-01-01 00:00:00+01:00')", "at = '9999-12-31 23:59:59-01:00'"],
    ZONED: ["at = TIMESTAMP '2024-01-31 12:00:00'"],
    "as a timestamp without a zone, e.g.": ["clock = '2024-01-31 12:00:00Z'"],
    "'noon' is not a valid timestamp[us] value": ["clock = 'noon'"],
    "compare column 'big' of type int64 with 1.0000000000000000001, Spark would have to round": ["big = 1.0000000000000000001"],
    "option lookup.where: the table has no column 'unknown'; it has id, big, name": ["unknown = 1"],
    "has no column 't.id'": ["`t.id` = 1"],
    # What Spark reads otherwise, or some Python does not read, is not a time.
    **{f"for column '{column}'": [f"{column} = '{text}'" for text in (
        "", "2024", "2024-1-31", "20240131", "2024-W05-3", "2024-01-31 25:00", "2024-01-31 12:00:00.1234567", "2024-01-31+01:00",
        "2024-01-31 12:00 Europe/Paris", "٢٠٢٤-٠١-٣١", "2024-01-31 12:00:00.5.5",
    )] for column in ("day", "clock", "at")},
    # No predicate, more than one, or too deep.
    "{start}": [
        "id =", "= 1", "id = 1 AND", "id = 1)", "(id = 1", "id = 'a", "WHERE id = 1", "id = 1; id = 2", "id = 1) OR (id = 2",
        "id = 1) AND id = 2 OR (id = 3", "id = 1 GROUP BY id", "id = 1) LIMIT (1", "id = 1) UNION ALL SELECT (1", "SELECT 1", "id, big",
        "-- nothing", "id NOT NOT", "id = `", "(" * 3000 + "id = 1" + ")" * 3000, "NOT " * 3000 + "flag",
    ],
}  # fmt: skip


@pytest.mark.parametrize("part", [*REFUSED, *MISFITS])
def test_what_is_refused(part: str) -> None:
    """A predicate that cannot be answered exactly as Spark would is an error that shows it; for a literal that does not fit, also column and type."""
    for text in REFUSED.get(part, MISFITS.get(part, [])):
        with pytest.raises(PredicateError, match=r"option lookup\.where") as caught:
            parse_where(text, SCHEMA)
        assert isinstance(caught.value, OptionError)
        message = str(caught.value)
        column, _, literal = text.partition(" = ")
        kind = SCHEMA.field(column).type if column in SCHEMA.names else None
        assert part.format(text=text, column=column, kind=kind, literal=literal, start=text[:20]) in message
        if part in REFUSED:
            construct = message.removeprefix("option lookup.where: ").partition(" is not supported")[0]
            assert part or {*WORD.findall(construct.lower())} & {*WORD.findall(text.lower())}
            assert "is not supported; supported are =, <>," in message or "LIKE takes a prefix only" in message


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


Answers = list[bool | None]
FIELDS = {
    "tiny": pa.field("tiny", pa.int8()), "big": pa.field("big", pa.int64()),
    "money": pa.field("money", pa.decimal128(5, 2)), "single": pa.field("single", pa.float32()),
    "double": pa.field("double", pa.float64()), "text": pa.field("text", pa.string()),
    "bytes": pa.field("bytes", pa.binary()), "flag": pa.field("flag", pa.bool_()), "day": pa.field("day", pa.date32()),
    "at": pa.field("at", pa.timestamp("us", "UTC")), "clock": pa.field("clock", pa.timestamp("us")),
}  # fmt: skip


def order(left: Any, right: Any) -> int:
    """-1, 0 or 1 as Spark orders two values: doubles if one is, NaN on top; text by its bytes."""
    keys: list[Any] = [value.encode() if isinstance(value, str) else value for value in (left, right)]
    if isinstance(left, float) or isinstance(right, float):
        keys = [(math.isnan(value), 0.0 if math.isnan(value) else value) for value in map(float, keys)]
    return (keys[0] > keys[1]) - (keys[0] < keys[1])


def compared(kind: pa.DataType, left: Any, op: str, right: Any) -> bool | None:
    # DecimalPrecision: an integer against a DECIMAL beyond BIGINT is decided without looking at it.
    if pa.types.is_integer(kind) and op in ("<", "<=", ">", ">=") and right is not None:
        typed_decimal = isinstance(right, Decimal) or (isinstance(right, int) and not -(2**63) <= right < 2**63)
        if typed_decimal and not -(2**63) <= right < 2**63:
            left = 0
    if left is None or right is None:
        return None
    sign = order(left, right)
    return {"=": sign == 0, "<>": sign != 0, "<": sign < 0, "<=": sign <= 0, ">": sign > 0, ">=": sign >= 0}[op]


def among(kind: pa.DataType, left: Any, values: Sequence[Any]) -> bool | None:
    if any(isinstance(value, float) for value in values):
        values = [None if value is None else float(value) for value in values]
    return combine_or(compared(kind, left, "=", value) for value in values)


def combine_or(answers: Iterable[bool | None]) -> bool | None:
    distinct = set(answers)
    return True if True in distinct else None if None in distinct else False


def inverted(answers: Answers) -> Answers:
    return [None if answer is None else not answer for answer in answers]


TENTH = 0.10000000149011612  # in 32 bits
DAY = datetime.date(2024, 1, 2)
MOMENTS = [datetime.datetime(1, 1, 2), datetime.datetime(2024, 1, 1), datetime.datetime(9999, 12, 30, 1, 2, 3, 4)]
EDGES: Mapping[str, tuple[list[Any], list[Any]]] = {
    "tiny": ([-128, -1, 0, 1, 127], [-129, -128, -1, 0, 127, 128, Decimal("-128.5"), Decimal("127.5"), Decimal("0.5"), 1.0, math.nan]),
    "big": ([-(2**63), 2**53, 2**53 + 1, 2**63 - 1], [-(2**63) - 1, -(2**63), 2**53 + 1, 2.0**53, 2**63 - 1, 2**63, Decimal("0.1")]),
    "money": (
        [Decimal("-999.99"), Decimal("-0.01"), Decimal("0.00"), Decimal("999.99")],
        [Decimal("-999.99"), Decimal("-999.991"), -1000, Decimal("-0.005"), 0, Decimal("999.99"), Decimal("999.999"), 1000, 999.99],
    ),
    "single": ([-math.inf, -1.5, -0.0, 0.0, TENTH, math.inf, math.nan], [-math.inf, -0.0, 0, 0.1, Decimal("0.1"), math.inf, math.nan]),
    "double": ([-math.inf, -1.5, -0.0, 0.0, 0.1, math.inf, math.nan], [-math.inf, -0.0, 0, 0.1, Decimal("0.1"), math.inf, math.nan]),
    "text": (["", "a", "a\0", "ab", "é", "\uffff", "\U0001f600"], ["", "a", "b", "\uffff", "\U0001f600"]),
    "bytes": ([b"", b"\x00", b"a", b"\xff"], [b"", b"a", b"\xff"]),
    "flag": ([False, True], [False, True]),
    "day": ([datetime.date.min, DAY, datetime.date.max], [datetime.date.min, DAY, datetime.date(2024, 1, 3), datetime.date.max]),
    "at": ([at.replace(tzinfo=UTC) for at in MOMENTS], [at.replace(tzinfo=UTC) for at in (*MOMENTS, datetime.datetime(2024, 1, 1, 1))]),
    "clock": (MOMENTS, [*MOMENTS, datetime.datetime(2024, 1, 1, 1)]),
}  # fmt: skip


def statistics(values: Sequence[Any], rows: int) -> list[ColumnStats | None]:
    """Statistics that writers may give for values and a null: none, the bounds, wider ones, bounds without a number of nulls, that number alone."""
    comparable = [value for value in values if not (isinstance(value, float) and math.isnan(value))]
    low, high = (end(comparable, key=lambda v: v.encode() if isinstance(v, str) else v) for end in (min, max))
    wide = (low, high)
    if isinstance(low, str):
        wide = low[:1], high[:1] + "\U0010ffff"
    elif isinstance(low, float):
        wide = math.nan, math.nan
    elif isinstance(low, int | Decimal) and not isinstance(low, bool):
        wide = low - 1, high + 1
    bounds = [(low, high, 1), (*wide, 1), (low, high, None), (None, None, 1)]
    return [None, *(ColumnStats(*limits, rows) for limits in bounds)]


def in_columns(kind: pa.DataType, stats: Sequence[ColumnStats | None]) -> StatsColumns:
    """The statistics of several files as columns; a bound that the column's widest type does not hold is not known."""
    kind = pa.int64() if pa.types.is_integer(kind) else pa.float64() if pa.types.is_floating(kind) else kind

    def get_bound(file_stats: ColumnStats | None, side: str) -> Any:
        try:
            return None if file_stats is None else pa.scalar(getattr(file_stats, side), kind).as_py()
        except (pa.ArrowInvalid, OverflowError):
            return None

    low, high = (pa.array([get_bound(file_stats, side) for file_stats in stats], kind) for side in ("low", "high"))
    numbers = [
        (None,) * 4
        if file_stats is None
        else (file_stats.null_count, file_stats.rows, *(file_stats.bucket or (None, None)))
        for file_stats in stats
    ]
    return StatsColumns(low, high, *(pa.array(column, pa.int64()) for column in zip(*numbers, strict=True)))


@pytest.mark.parametrize("name", EDGES)
def test_evaluate_at_the_edges(name: str) -> None:
    """At the ends of types and around literals each row is what Spark says, and what statistics rule out has no true row."""
    (values, operands), field = EDGES[name], FIELDS[name]
    whole = pa.array([None, values[0], None, *values], field.type)
    chunk = {name: whole.slice(2)}
    rows = chunk[name].to_pylist()
    cases: list[tuple[Predicate, Answers]] = [
        (Constant(answer), [answer] * len(rows)) for answer in (True, False, None)
    ]
    cases += [(IsNull(name), [row is None for row in rows]), (bind_compare(field, "=", None), [None] * len(rows))]
    for listed in (operands, [None], *([operand] for operand in operands), *([operand, None] for operand in operands)):
        cases.append((bind_in(field, listed), [among(field.type, row, listed) for row in rows]))
    for operand in operands:
        for op in ("=", "<>", "<", "<=", ">", ">="):
            cases.append((bind_compare(field, op, operand), [compared(field.type, row, op, operand) for row in rows]))
        equal = bind_compare(field, "=", operand)
        safe = NullSafeEqual(name, equal.value) if isinstance(equal, Compare) else Constant(False)
        cases.append((safe, [compared(field.type, row, "=", operand) is True for row in rows]))
        if name == "text":
            cases.append(
                (StartsWith(name, operand), [None if row is None else row.startswith(operand) for row in rows])
            )
    for (first_node, first_expected), (second_node, second_expected) in itertools.pairwise(cases[:]):
        cases.append(
            (
                Or((first_node, second_node)),
                [combine_or(pair) for pair in zip(first_expected, second_expected, strict=True)],
            )
        )
        neither = [combine_or(pair) for pair in zip(inverted(first_expected), inverted(second_expected), strict=True)]
        cases.append((And((first_node, second_node)), inverted(neither)))
    all_stats = statistics(values, len(rows))
    columns = in_columns(field.type, all_stats)
    for node, expected in [*cases, *((negate(node), inverted(answers)) for node, answers in cases)]:
        actual = evaluate(node, chunk, len(rows))
        assert actual.type == pa.bool_()
        assert actual.to_pylist() == expected, node
        assert negate(negate(node)) == node
        together = may_match_files(node, {name: columns}.get, len(all_stats)).tolist()
        for stats, among_others in zip(all_stats, together, strict=True):
            alone = may_match(node, {name: stats}.get)
            assert alone or True not in expected, (node, stats)
            assert among_others or not alone, (node, stats)


C = "c"
NUMBERS_AND_NULLS, ALL_NULL = ColumnStats(1, 9, 2, 10), ColumnStats(None, None, 10, 10)
PRUNED: list[tuple[ColumnStats | None, list[Predicate]]] = [
    (NUMBERS_AND_NULLS, [Compare(C, op, value) for op, value in (("=", 0), ("=", 10), ("<", 1), (">", 9))]),
    (NUMBERS_AND_NULLS, [In(C, (0, 10), False), In(C, (), True), NullSafeEqual(C, 0), Constant(None)]),
    (NUMBERS_AND_NULLS, [And((Compare(C, "=", 5), Compare(C, "=", 0)))]),
    (ALL_NULL, [IsNull(C, negated=True), Compare(C, "<>", 1), Constant(True, C)]),
    (ColumnStats(None, None, 0, 10), [IsNull(C), Constant(False, C)]),
    (ColumnStats("b", "d", 0, 10), [StartsWith(C, "a"), StartsWith(C, "dz")]),
    (ColumnStats(1.0, 9.0, 0, 10), [Compare(C, "<", 1.0)]),
    (None, [Constant(False, C)]),
]


def test_may_match_prunes() -> None:
    """Bounds rule out what lies outside of them. (That they rule out nothing else is the subject of the edges.)"""
    for stats, nodes in PRUNED:
        for node in nodes:
            assert not may_match(node, {C: stats}.get), (stats, node)
            kind = pa.array([None if stats is None else stats.low]).type
            together = may_match_files(node, {C: in_columns(kind, [stats, stats])}.get, 2)
            assert not together.any(), (stats, node)


def test_many_keys_rule_files_out() -> None:
    """Of more keys than are compared one by one, each file is asked for the nearest."""
    keys = Among(C, pa.array(range(0, 1000, 10)))
    stats = [ColumnStats(low, low + 4, 0, 10) for low in range(0, 1000, 5)]
    for values, kind in ((keys.values, pa.int64()), (keys.values.cast(pa.string()), pa.string())):
        one_type = [
            stat if kind == pa.int64() else ColumnStats(*sorted(map(str, (stat.low, stat.high))), 0, 10)
            for stat in stats
        ]
        together = may_match_files(Among(C, values), {C: in_columns(kind, one_type)}.get, len(stats))
        assert together.tolist() == [may_match(Among(C, values), {C: stat}.get) for stat in one_type]
        assert 0 < together.sum() < len(stats)


@pytest.mark.parametrize("name", ["big", "text", "day", "at"])
def test_buckets_rule_files_out(name: str) -> None:
    """Many files of one of 4 or 7 buckets, some with bounds, some with nothing: each is ruled out as it is alone."""
    kind = FIELDS[name].type
    start = {"text": "", "day": datetime.date(2024, 1, 1), "at": datetime.datetime(2024, 1, 1, tzinfo=UTC)}.get(name, 0)
    values: list[Any] = []
    for number in range(40):
        step = {"text": f"v{number}", "day": datetime.timedelta(number), "at": datetime.timedelta(0, number)}
        values.append(start + step.get(name, number))  # type: ignore[operator]
    stats: list[ColumnStats | None] = [None, ColumnStats(None, None, 3, 3), ColumnStats(None, None, 0, 3)]
    for count, bucket in [*((4, bucket) for bucket in range(4)), *((7, bucket) for bucket in range(7))]:
        stats.append(ColumnStats(None, None, 0, 3, (count, bucket)))
        stats.append(ColumnStats(min(values[:20]), max(values[:20]), 1, 3, (count, bucket)))
    columns = in_columns(kind, stats)
    assert [columns.row(place) for place in range(len(stats))] == stats
    keys = [Among(C, pa.array(part, kind)) for part in (values[:3], values[20:], values[:0], values[3:4])]
    conditions = [In(C, (*values[5:7],), False), NullSafeEqual(C, values[8]), Compare(C, "<>", values[1]), IsNull(C)]
    nodes: list[Predicate] = [*(Compare(C, "=", value) for value in values), *keys, *conditions]
    ruled_out = 0
    for node in nodes:
        together = may_match_files(node, {C: columns}.get, len(stats)).tolist()
        for stat, among_others in zip(stats, together, strict=True):
            alone = may_match(node, {C: stat}.get)
            # Alone, several keys are looked for in the bounds and in the bucket, but not each of them in both.
            assert among_others == alone or (alone and isinstance(node, Among)), (stat, node)
            ruled_out += not among_others
    assert ruled_out > len(nodes) * len(stats) / 3


def test_a_literal_of_another_type_is_not_cut_to_the_columns() -> None:
    """A plan may be older than the type of a column. Arrow would make 1.5 the whole number 1."""
    stats = {C: in_columns(pa.int64(), [ColumnStats(1, 1, 0, 3)])}
    for node in (Compare(C, "<", Decimal("1.5")), Compare(C, ">=", Decimal("0.5"))):
        assert may_match_files(node, stats.get, 1).all(), node
    days = {C: in_columns(pa.date32(), [ColumnStats(datetime.date(2024, 1, 1), datetime.date(2024, 1, 1), 0, 3)])}
    assert may_match_files(Compare(C, "<", datetime.datetime(2024, 1, 1, 12)), days.get, 1).all()
    assert may_match_files(In(C, (datetime.datetime(2024, 1, 1, 12),), False), days.get, 1).all()


def test_bind_refuses_what_spark_would_round() -> None:
    """Digits beyond the 38 that Spark compares with are an error; beyond the column's range they do not matter."""
    huge = pa.field("huge", pa.decimal128(38, 10))
    assert bind_compare(huge, "<", Decimal("1.5")) == Compare("huge", "<", Decimal("1.5"))
    with pytest.raises(PredicateError, match=r"compare column 'huge' .* 0\.00000000001, Spark would"):
        bind_compare(huge, "<", Decimal("0.00000000001"))
    assert bind_compare(huge, "<", 10**29) == Constant(True, "huge")
    with pytest.raises(PredicateError, match="would have to round"):
        bind_in(huge, [Decimal("1.5"), 10**29])
    with pytest.raises(PredicateError, match="would have to round"):
        bind_compare(FIELDS["big"], "=", Decimal("1.0000000000000000001"))


def test_doubles_meet_decimals_to_the_last_digit() -> None:
    """A decimal column against a double compares the double nearest to each decimal, as Spark does."""
    column = {"c": pa.array([Decimal(1) / 3 * n for n in range(-200, 200)], pa.decimal128(38, 28))}
    values = column["c"].to_pylist()
    for value in values:
        actual = evaluate(Compare("c", "=", float(value)), column, len(values))
        assert actual.to_pylist() == [float(double) == float(value) for double in values]


def test_times_beyond_python_are_compared() -> None:
    """Dates and timestamps that Python cannot hold are rows like others; TRUE, FALSE and NULL need no column for an answer."""
    days = pa.array([-(2**31) + 1, 19000, 2**31 - 1], pa.int32()).cast(pa.date32())
    assert evaluate(Compare("d", "<", datetime.date(2024, 1, 1)), {"d": days}, 3).to_pylist() == [True, True, False]
    clock = pa.array([-(2**62), 0, 2**62], pa.timestamp("us"))
    node = In("t", (datetime.datetime(1970, 1, 1),), has_null=False, negated=True)
    assert evaluate(node, {"t": clock}, 3).to_pylist() == [True, False, True]
    assert [evaluate(Constant(v), {}, 2).to_pylist() for v in (True, False, None)] == [[True] * 2, [False] * 2, [None] * 2]  # fmt: skip
    three = Constant(True), Constant(True), Constant(False)
    assert [evaluate(combine(parts), {}, 1)[0].as_py() for combine, parts in ((And, three), (Or, three[::-1]))] == [False, True]  # fmt: skip
    assert referenced_columns(Or((Constant(True, "a"), And((IsNull("b"), Constant(True)))))) == {"a", "b"}


STRINGS = {
    "'O''Brien'": "O'Brien", r"'O\'Brien'": "O'Brien", '"O\'Brien"': "O'Brien", '"a""b"': 'a"b', "'a\"\"b'": 'a""b', "''": "", "\'\'\'\'": "'",
    "'a' 'b'": "ab", "'a'\n  \"b\" 'c'": "abc", r"'\u00e9\101\0\Z\q\"\b\t'": "éA\0\x1aq\"\b\t", r"'\U0001F600'": "😀",
    r"'\uD83D\uDE00'": "😀", r"'a\\n'": "a\\n", r"r'a\nb'": r"a\nb", r'R"a\"': 'a\\', "'-- no comment'": "-- no comment",
    "'/* nor this */' -- 'but this'": "/* nor this */", "'7'": "7", r"'100\%'": r"100\%", "'a\\\nb'": "a\nb",
}  # fmt: skip


@pytest.mark.parametrize("literal", STRINGS)
def test_string_literals(literal: str) -> None:
    """A string literal means what it means to Spark: doubled and escaped quotes, both kinds of them, escapes, raw and adjacent literals."""
    assert parse_where(f"`name` = {literal}", SCHEMA) == Compare("name", "=", STRINGS[literal])
    assert parse_where(f"name IN ({literal}\n, 'x')", SCHEMA) == In("name", (STRINGS[literal], "x"), False)
