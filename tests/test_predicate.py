"""Predicates against a slow oracle of Spark's semantics, row by row, and against statistics."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import PredicateError
from pyspark_lookup.columnar.binding import bind_compare, bind_in
from pyspark_lookup.columnar.predicate import (
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
    columns_of,
    evaluate,
    may_match,
    negate,
)

UTC = datetime.timezone.utc
Tree = tuple[Any, ...]
"""An unbound predicate: ("compare", column, op, literal), ("in", column, literals), ("safe", column, literal),
("null", column), ("prefix", column, text), ("constant", value), ("and" | "or", tree, tree), ("not", tree)."""

FIELDS = {
    "tiny": pa.field("tiny", pa.int8()),
    "big": pa.field("big", pa.int64()),
    "money": pa.field("money", pa.decimal128(5, 2)),
    "single": pa.field("single", pa.float32()),
    "double": pa.field("double", pa.float64()),
    "text": pa.field("text", pa.string()),
    "bytes": pa.field("bytes", pa.binary()),
    "flag": pa.field("flag", pa.bool_()),
    "day": pa.field("day", pa.date32()),
    "at": pa.field("at", pa.timestamp("us", "UTC")),
    "clock": pa.field("clock", pa.timestamp("us")),
}


def bound(tree: Tree) -> Predicate:
    """The tree as the package binds it."""
    match tree:
        case ("compare", name, op, value):
            return bind_compare(FIELDS[name], op, value)
        case ("in", name, values):
            return bind_in(FIELDS[name], values)
        case ("null", name) | ("safe", name, None):
            return IsNull(name)
        case ("safe", name, value):
            leaf = bind_compare(FIELDS[name], "=", value)
            return NullSafeEqual(name, leaf.value) if isinstance(leaf, Compare) else Constant(False)
        case ("prefix", name, prefix):
            return StartsWith(name, prefix)
        case ("constant", value):
            return Constant(value)
        case ("not", inner):
            return negate(bound(inner))
        case (combine, left, right):
            return (And if combine == "and" else Or)((bound(left), bound(right)))
    raise AssertionError(tree)


# --- the oracle -----------------------------------------------------------------------------------


def order(one: Any, other: Any) -> int:
    """-1, 0 or 1 as Spark orders two values: doubles if one is, NaN on top; text by its bytes."""
    keys: list[Any] = [value.encode() if isinstance(value, str) else value for value in (one, other)]
    if isinstance(one, float) or isinstance(other, float):
        keys = [(math.isnan(value), 0.0 if math.isnan(value) else value) for value in map(float, keys)]
    return (keys[0] > keys[1]) - (keys[0] < keys[1])


def compared(one: Any, op: str, other: Any) -> bool | None:
    if one is None or other is None:
        return None
    sign = order(one, other)
    return {"=": sign == 0, "<>": sign != 0, "<": sign < 0, "<=": sign <= 0, ">": sign > 0, ">=": sign >= 0}[op]


def spark_answer(tree: Tree, row: Mapping[str, Any]) -> bool | None:
    """What Spark says of one row."""
    match tree:
        case ("compare", name, op, value):
            kind = FIELDS[name].type
            # DecimalPrecision: an integer against a DECIMAL beyond its type is decided without looking at it.
            if pa.types.is_integer(kind) and op in ("<", "<=", ">", ">=") and value is not None:
                typed_decimal = isinstance(value, Decimal) or (isinstance(value, int) and not -(2**63) <= value < 2**63)
                low, high = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
                if typed_decimal and not low <= value <= high:
                    return compared(0, op, value)
            return compared(row[name], op, value)
        case ("in", name, values):
            if any(isinstance(value, float) for value in values):
                values = [None if value is None else float(value) for value in values]
            answers = [compared(row[name], "=", value) for value in values]
            return True if True in answers else None if None in answers else False
        case ("null", name):
            return row[name] is None
        case ("safe", name, value):
            return row[name] is None if value is None else compared(row[name], "=", value) is True
        case ("prefix", name, prefix):
            return None if row[name] is None else row[name].startswith(prefix)
        case ("constant", value):
            return value
        case ("not", inner):
            answer = spark_answer(inner, row)
            return None if answer is None else not answer
        case (combine, left, right):
            answers = {spark_answer(left, row), spark_answer(right, row)}
            deciding = combine == "or"
            return deciding if deciding in answers else None if None in answers else not deciding
    raise AssertionError(tree)


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
    """What writers may say of values and a null: the bounds, wider ones, none, no number of nulls, nothing."""
    known = [value for value in values if not (isinstance(value, float) and math.isnan(value))]
    low, high = (end(known, key=lambda v: v.encode() if isinstance(v, str) else v) for end in (min, max))
    wide = (low, high)
    if isinstance(low, str):
        wide = low[:1], high[:1] + "\U0010ffff"
    elif isinstance(low, float):
        wide = math.nan, math.nan
    elif isinstance(low, int | Decimal) and not isinstance(low, bool):
        wide = low - 1, high + 1
    bounds = [(low, high, 1), (*wide, 1), (low, high, None), (None, None, 1)]
    return [None, *(ColumnStats(*bound, rows) for bound in bounds)]


@pytest.mark.parametrize("name", EDGES)
def test_evaluate_at_the_edges(name: str) -> None:
    """Least and greatest values, literals just inside and outside of them, NaN, zeros, text beyond ASCII: all pairs.

    Every row is true, false or null as Spark says, of arrays that start inside their buffers, too; and where statistics
    rule a predicate out, no row makes it true. (test_same_rows asks Spark itself, of generated predicates.)
    """
    values, others = EDGES[name]
    whole = pa.array([None, values[0], None, *values], FIELDS[name].type)
    chunk = {name: whole.slice(2)}
    rows = chunk[name].to_pylist()
    leaves: list[Tree] = [("constant", constant) for constant in (True, False, None)]
    leaves += [("null", name), ("safe", name, None), ("in", name, others), ("in", name, [None])]
    leaves += [("prefix", name, other) for other in others if name == "text"]
    for other in others:
        leaves += [("compare", name, op, other) for op in ("=", "<>", "<", "<=", ">", ">=")]
        leaves += [
            ("compare", name, "=", None),
            ("safe", name, other),
            ("in", name, [other]),
            ("in", name, [other, None]),
        ]
    pairs: list[Tree] = [(op, one, two) for op in ("and", "or") for one, two in itertools.pairwise(leaves)]
    for tree in (*leaves, *pairs, *(("not", tree) for tree in (*leaves, *pairs))):
        node = bound(tree)
        expected = [spark_answer(tree, {name: value}) for value in rows]
        found = evaluate(node, chunk, len(rows))
        assert found.type == pa.bool_()
        assert found.to_pylist() == expected, tree
        assert negate(negate(node)) == node
        for stats in statistics(values, len(rows)):
            assert may_match(node, {name: stats}.get) or True not in expected, (tree, stats)


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


# --- binding --------------------------------------------------------------------------------------


def test_bind_refuses_what_spark_would_round() -> None:
    """Digits beyond the 38 that Spark compares with are an error; beyond the column's range they do not matter."""
    huge = pa.field("huge", pa.decimal128(38, 10))
    assert bind_compare(huge, "<", Decimal("1.5")) == Compare("huge", "<", Decimal("1.5"))
    with pytest.raises(PredicateError, match=r"would round column 'huge' .* 0\.00000000001"):
        bind_compare(huge, "<", Decimal("0.00000000001"))
    assert bind_compare(huge, "<", 10**29) == Constant(True, "huge")
    with pytest.raises(PredicateError, match="would round"):
        bind_in(huge, [Decimal("1.5"), 10**29])
    with pytest.raises(PredicateError, match="would round"):
        bind_compare(FIELDS["big"], "=", Decimal("1.0000000000000000001"))


# --- values at the edges --------------------------------------------------------------------------


def test_doubles_meet_decimals_to_the_last_digit() -> None:
    """A decimal column against a double compares the double nearest to each decimal, as Spark does."""
    with decimal.localcontext(decimal.Context(prec=60)):
        values = [Decimal(n * 7919) / 100 for n in range(-3000, 3000)]
    column = {"c": pa.array(values, pa.decimal128(38, 2))}
    for value in (values[17], values[1234], values[-1], Decimal("-217.70")):
        found = evaluate(Compare("c", "=", float(value)), column, len(values))
        assert found.to_pylist() == [float(v) == float(value) for v in values]
    third = {"c": pa.array([Decimal(1) / 3 * n for n in range(1, 200)], pa.decimal128(38, 28))}
    for n, value in enumerate(third["c"].to_pylist()):
        assert evaluate(Compare("c", "=", float(value)), third, 199).to_pylist()[n] is True


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
    assert columns_of(Or((Constant(True, "a"), And((IsNull("b"), Constant(True)))))) == {"a", "b"}
