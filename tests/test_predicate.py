"""Predicates against a slow oracle of Spark's semantics, row by row, and against statistics."""

from __future__ import annotations

import datetime
import decimal
import math
import struct
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyspark_lookup.base.errors import PredicateError
from pyspark_lookup.columnar.binding import bind_compare, bind_in, parse_date, parse_timestamp
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
from tests.fuzzing import MORE

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


def _single(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


FLOATS = st.sampled_from([0.0, -0.0, 1.5, -1.5, math.nan, math.inf, -math.inf, 0.1, 1e10, 127.0]) | st.floats(width=32)
TEXTS = st.sampled_from(["", "a", "ab", "abc", "b", "é", "z", "\uffff", "\U0001f600", "a\0"]) | st.text(max_size=3)
DAYS = st.dates(datetime.date(2024, 1, 1), datetime.date(2024, 1, 4)) | st.dates()
CLOCKS = st.datetimes(datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 2)) | st.sampled_from(
    [datetime.datetime(2024, 1, 1), datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30, 1, 2, 3, 4)]
)
VALUES: Mapping[str, st.SearchStrategy[Any]] = {
    "tiny": st.integers(-3, 3) | st.integers(-128, 127) | st.sampled_from([-128, 127]),
    "big": st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**53, 2**53 + 1, -(2**63)]),
    "money": st.integers(-300, 300).map(lambda i: Decimal(i) / 100) | st.decimals("-999.99", "999.99", places=2),
    "single": FLOATS.map(_single),
    "double": FLOATS | st.floats(),
    "text": TEXTS,
    "bytes": TEXTS.map(str.encode) | st.binary(max_size=2),
    "flag": st.booleans(),
    "day": DAYS,
    "at": CLOCKS.map(lambda t: t.replace(tzinfo=UTC)),
    "clock": CLOCKS,
}
NUMBERS = st.one_of(
    st.integers(-4, 4), st.sampled_from([127, 128, -128, -129, 2**53, 2**63, -(2**63) - 1, 10**20]), st.integers(-(2**64), 2**64),
    st.decimals("-1000", "1000", places=3), st.sampled_from([Decimal("127.5"), Decimal("-128.5"), Decimal("1.50"), Decimal("9999.99")]),
    FLOATS,
)  # fmt: skip
OPS = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])


def literals(name: str) -> st.SearchStrategy[Any]:
    return VALUES[name] | NUMBERS if name in ("tiny", "big", "money", "single", "double") else VALUES[name]


def trees(names: Sequence[str]) -> st.SearchStrategy[Tree]:
    def leaf(name: str) -> st.SearchStrategy[Tree]:
        value, column = literals(name), st.just(name)
        ways: list[st.SearchStrategy[Tree]] = [
            st.tuples(st.just("compare"), column, OPS, value),
            st.tuples(st.just("compare"), column, OPS, value | st.none()),
            st.tuples(st.just("in"), column, st.lists(value | st.none(), min_size=1, max_size=4)),
            st.tuples(st.just("safe"), column, value | st.none()),
            st.tuples(st.just("null"), column),
        ]
        if name == "text":
            ways.append(st.tuples(st.just("prefix"), column, TEXTS))
        return st.one_of(ways)

    constant = st.tuples(st.just("constant"), st.sampled_from([True, False, None]))
    return st.recursive(
        st.sampled_from(names).flatmap(leaf) | constant,
        lambda inner: st.tuples(st.sampled_from(["and", "or"]), inner, inner) | st.tuples(st.just("not"), inner),
        max_leaves=5,
    )


def bound(tree: Tree) -> Predicate:
    """The tree as the package binds it."""
    match tree:
        case ("compare", name, op, value):
            return bind_compare(FIELDS[name], op, value)
        case ("in", name, values):
            return bind_in(FIELDS[name], values)
        case ("null", name):
            return IsNull(name)
        case ("safe", name, None):
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
    if isinstance(one, float) or isinstance(other, float):
        one, other = float(one), float(other)
        keys = (
            (math.isnan(one), 0.0 if math.isnan(one) else one),
            (math.isnan(other), 0.0 if math.isnan(other) else other),
        )
    elif isinstance(one, str):
        keys = (one.encode(), other.encode())  # type: ignore[assignment]
    else:
        keys = (one, other)  # type: ignore[assignment]
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


GROUPS = [("tiny", "double", "text"), ("big", "money", "single"), ("bytes", "flag", "day"), ("at", "clock", "text")]


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, pa.Array], Tree]:
    """A few rows of some columns, some of them null, and a predicate over these columns."""
    names = draw(st.sampled_from(GROUPS))
    rows = draw(st.integers(0, 6))
    chunk = {
        name: pa.array(draw(st.lists(VALUES[name] | st.none(), min_size=rows, max_size=rows)), FIELDS[name].type)
        for name in names
    }
    return chunk, draw(trees(names))


def rows_of(chunk: Mapping[str, pa.Array]) -> list[dict[str, Any]]:
    return pa.table(dict(chunk)).to_pylist()


def answers_of(node: Predicate, chunk: Mapping[str, pa.Array]) -> list[bool | None]:
    found = evaluate(node, chunk, len(next(iter(chunk.values()))))
    assert found.type == pa.bool_()
    return list(found.to_pylist())


@settings(max_examples=150 * MORE, deadline=None, derandomize=True)
@given(cases())
def test_evaluate_is_sparks_answer(case: tuple[dict[str, pa.Array], Tree]) -> None:
    """Every row of every type is true, false or null as Spark says."""
    chunk, tree = case
    assert answers_of(bound(tree), chunk) == [spark_answer(tree, row) for row in rows_of(chunk)]


EDGES: Mapping[str, tuple[list[Any], list[Any]]] = {
    "tiny": ([-128, -1, 0, 1, 127], [-129, -128, -1, 0, 127, 128, Decimal("-128.5"), Decimal("127.5"), Decimal("0.5"), 1.0, math.nan]),
    "big": ([-(2**63), 2**53, 2**53 + 1, 2**63 - 1], [-(2**63) - 1, -(2**63), 2**53 + 1, 2.0**53, 2**63 - 1, 2**63, Decimal("0.1")]),
    "money": (
        [Decimal("-999.99"), Decimal("-0.01"), Decimal("0.00"), Decimal("999.99")],
        [Decimal("-999.99"), Decimal("-999.991"), -1000, Decimal("-0.005"), 0, Decimal("999.99"), Decimal("999.999"), 1000, 999.99],
    ),
    "single": ([-math.inf, -1.5, -0.0, 0.0, _single(0.1), math.inf, math.nan], [-math.inf, -0.0, 0, 0.1, Decimal("0.1"), math.inf, math.nan]),
    "double": ([-math.inf, -1.5, -0.0, 0.0, 0.1, math.inf, math.nan], [-math.inf, -0.0, 0, 0.1, Decimal("0.1"), math.inf, math.nan]),
    "text": (["", "a", "a\0", "ab", "é", "\uffff", "\U0001f600"], ["", "a", "b", "\uffff", "\U0001f600"]),
    "bytes": ([b"", b"\x00", b"a", b"\xff"], [b"", b"a", b"\xff"]),
    "flag": ([False, True], [False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_evaluate_at_the_edges(name: str) -> None:
    """Least and greatest values, literals just inside and outside of them, NaN, zeros, text beyond ASCII: all pairs."""
    values, others = EDGES[name]
    chunk = {name: pa.array([*values, None], FIELDS[name].type)}
    stats = {name: ColumnStats(*_bounds(values), 1, len(values) + 1)}
    for other in others:
        leaves: list[Tree] = [("compare", name, op, other) for op in ("=", "<>", "<", "<=", ">", ">=")]
        leaves += [("safe", name, other), ("in", name, [other]), ("in", name, [other, None]), ("in", name, others)]
        for leaf in leaves:
            for tree in (leaf, ("not", leaf)):
                expected = [spark_answer(tree, row) for row in rows_of(chunk)]
                assert answers_of(bound(tree), chunk) == expected, tree
                assert may_match(bound(tree), stats.get) or True not in expected, tree


def _bounds(values: Sequence[Any]) -> tuple[Any, Any]:
    known = [value for value in values if not (isinstance(value, float) and math.isnan(value))]
    return min(known, key=_key), max(known, key=_key)


@settings(max_examples=100 * MORE, deadline=None, derandomize=True)
@given(cases(), st.integers(0, 3))
def test_evaluate_takes_slices(case: tuple[dict[str, pa.Array], Tree], start: int) -> None:
    """Arrays that start inside their buffers answer like fresh ones."""
    chunk, tree = case
    node = bound(tree)
    sliced = {name: array.slice(start) for name, array in chunk.items()}
    assert answers_of(node, sliced) == answers_of(node, chunk)[start:]


@settings(max_examples=150 * MORE, deadline=None, derandomize=True)
@given(cases())
def test_negate_is_not(case: tuple[dict[str, pa.Array], Tree]) -> None:
    """NOT twice is the predicate itself; NOT once swaps true and false and leaves null."""
    chunk, tree = case
    node = bound(tree)
    assert negate(negate(node)) == node
    swapped = [None if answer is None else not answer for answer in answers_of(node, chunk)]
    assert answers_of(negate(node), chunk) == swapped
    assert columns_of(negate(node)) == columns_of(node)


# --- statistics -----------------------------------------------------------------------------------


def bounds_of(array: pa.Array, draw: st.DrawFn) -> ColumnStats | None:
    """Statistics as a writer may leave them: exact, wider, partly unknown, or none."""
    values = [v for v in array.to_pylist() if v is not None and not (isinstance(v, float) and math.isnan(v))]
    kind = draw(st.sampled_from(["exact", "exact", "exact", "wide", "no bounds", "no nulls", "none"]))
    if kind == "none":
        return None
    low, high = (min(values, key=_key), max(values, key=_key)) if values else (None, None)
    if kind == "no bounds":
        low = high = None
    if kind == "wide" and isinstance(low, str):
        low, high = low[:1], high[:1] + "\U0010ffff"
    elif kind == "wide" and isinstance(low, (int, Decimal)) and not isinstance(low, bool):
        low, high = low - 1, high + 1
    elif kind == "wide" and isinstance(low, float) and draw(st.booleans()):
        low = high = math.nan
    return ColumnStats(low, high, None if kind == "no nulls" else array.null_count, len(array))


def _key(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


@settings(max_examples=250 * MORE, deadline=None, derandomize=True)
@given(st.data(), cases())
def test_may_match_loses_no_row(data: st.DataObject, case: tuple[dict[str, pa.Array], Tree]) -> None:
    """Where statistics rule a predicate out, no row makes it true."""
    chunk, tree = case
    stats = {name: bounds_of(array, data.draw) for name, array in chunk.items()}
    node = bound(tree)
    if not may_match(node, stats.get):
        assert True not in answers_of(node, chunk)


ONE_TO_NINE = ColumnStats(1, 9, 2, 10)
TEXT_B_TO_D = ColumnStats("b", "d", 0, 10)
ALL_NULL = ColumnStats(None, None, 10, 10)
NO_NULL = ColumnStats(None, None, 0, 10)


@pytest.mark.parametrize(
    ("stats", "node", "expected"),
    [
        (ONE_TO_NINE, Compare("c", "=", 0), False),
        (ONE_TO_NINE, Compare("c", "=", 1), True),
        (ONE_TO_NINE, Compare("c", "=", 10), False),
        (ONE_TO_NINE, Compare("c", "<", 1), False),
        (ONE_TO_NINE, Compare("c", "<=", 1), True),
        (ONE_TO_NINE, Compare("c", ">", 9), False),
        (ONE_TO_NINE, Compare("c", ">=", 9), True),
        (ONE_TO_NINE, Compare("c", "<>", 1), True),
        (ONE_TO_NINE, In("c", (0, 10), False), False),
        (ONE_TO_NINE, In("c", (0, 5), False), True),
        (ONE_TO_NINE, In("c", (), True), False),
        (ONE_TO_NINE, In("c", (0,), False, negated=True), True),
        (ONE_TO_NINE, NullSafeEqual("c", 0), False),
        (ONE_TO_NINE, NullSafeEqual("c", 0, negated=True), True),
        (ONE_TO_NINE, IsNull("c"), True),
        (ONE_TO_NINE, IsNull("c", negated=True), True),
        (ALL_NULL, IsNull("c", negated=True), False),
        (ALL_NULL, Compare("c", "<>", 1), False),
        (ALL_NULL, NullSafeEqual("c", 1, negated=True), True),
        (ALL_NULL, Constant(True, "c"), False),
        (NO_NULL, IsNull("c"), False),
        (NO_NULL, Constant(False, "c"), False),
        (TEXT_B_TO_D, StartsWith("c", "a"), False),
        (TEXT_B_TO_D, StartsWith("c", "dz"), False),
        (TEXT_B_TO_D, StartsWith("c", "bz"), True),
        (TEXT_B_TO_D, StartsWith("c", ""), True),
        (TEXT_B_TO_D, StartsWith("c", "a", negated=True), True),
        (ColumnStats(1.0, 9.0, 0, 10), Compare("c", ">", 9.0), True),  # NaN may be there
        (ColumnStats(1.0, 9.0, 0, 10), Compare("c", "<", 1.0), False),
        (ColumnStats(1.0, 9.0, 0, 10), Compare("c", "=", math.nan), True),
        (None, Compare("c", "=", 1), True),
        (None, Constant(False, "c"), False),
        (ONE_TO_NINE, Constant(None), False),
        (ONE_TO_NINE, And((Compare("c", "=", 5), Compare("c", "=", 0))), False),
        (ONE_TO_NINE, Or((Compare("c", "=", 5), Compare("c", "=", 0))), True),
    ],
)  # fmt: skip
def test_may_match_prunes(stats: ColumnStats | None, node: Predicate, expected: bool) -> None:
    """Bounds rule out what lies outside of them, and only that."""
    assert may_match(node, lambda name: stats) is expected


# --- binding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "op", "value", "expected"),
    [
        ("tiny", "=", 5, Compare("tiny", "=", 5)),
        ("tiny", "=", Decimal("5.00"), Compare("tiny", "=", 5)),
        ("tiny", "=", 128, Constant(False, "tiny")),
        ("tiny", "=", -129, Constant(False, "tiny")),
        ("tiny", "=", -128, Compare("tiny", "=", -128)),
        ("tiny", "<>", 300, Constant(True, "tiny")),
        ("tiny", "<", 300, Constant(True, "tiny")),
        ("tiny", ">", -300, Constant(True, "tiny")),
        ("tiny", "<", Decimal("300.0"), Constant(True)),  # true of null as well: Spark's DecimalPrecision
        ("tiny", "=", Decimal("300.0"), Constant(False, "tiny")),
        ("big", ">=", 2**63, Constant(False)),
        ("tiny", "<", Decimal("2.5"), Compare("tiny", "<=", 2)),
        ("tiny", ">=", Decimal("2.5"), Compare("tiny", ">", 2)),
        ("tiny", "<>", Decimal("2.5"), Constant(True, "tiny")),
        ("tiny", "<", -2.5, Compare("tiny", "<", -2.5)),
        ("money", "=", 7, Compare("money", "=", Decimal(7))),
        ("money", "<", Decimal("-0.005"), Compare("money", "<=", Decimal("-0.01"))),
        ("money", ">", 1000, Constant(False, "money")),
        ("money", ">", -1000, Constant(True, "money")),
        ("double", "=", Decimal("0.1"), Compare("double", "=", 0.1)),
        ("double", "=", 3, Compare("double", "=", 3.0)),
        ("day", "=", "2024-01-31", Compare("day", "=", datetime.date(2024, 1, 31))),
        ("clock", "<", datetime.date(2024, 1, 31), Compare("clock", "<", datetime.datetime(2024, 1, 31))),
        ("at", "<", "2024-01-31 12:00:00+01:00", Compare("at", "<", datetime.datetime(2024, 1, 31, 11, tzinfo=UTC))),
        ("text", "=", None, Constant(None)),
    ],
)  # fmt: skip
def test_bind_brings_literals_into_the_column(name: str, op: str, value: Any, expected: Predicate) -> None:
    """A literal becomes a value of the column's type, or the answer it always gives."""
    assert bind_compare(FIELDS[name], op, value) == expected


def test_bind_in_keeps_what_can_match() -> None:
    """Values outside of the column's domain go, doubles make the list doubles, NULL is remembered."""
    assert bind_in(FIELDS["tiny"], [1, 300, Decimal("2.5"), 1, None]) == In("tiny", (1,), has_null=True)
    assert bind_in(FIELDS["big"], [2**53 + 1, 1.0]) == In("big", (float(2**53), 1.0), has_null=False)
    assert bind_in(FIELDS["text"], ["a", "b", "a"]) == In("text", ("a", "b"), has_null=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tiny", "5", r"'tiny' of type int8 cannot be compared with '5'"),
        ("tiny", True, r"'tiny' of type int8 cannot be compared with True"),
        ("text", 5, r"'text' of type string cannot be compared with 5; quote it: '5'"),
        ("text", datetime.date(2024, 1, 2), r"compared with '2024-01-02'; quote it: '2024-01-02'"),
        ("bytes", "a", r"'bytes' of type binary cannot be compared with 'a'"),
        ("flag", 1, r"'flag' of type bool cannot be compared with 1"),
        ("double", "NaN", r"'double' of type double cannot be compared with 'NaN'"),
        ("day", "31.1.2024", r"'31.1.2024' is no date32\[day\] value for column 'day'"),
        ("day", "20240131", r"is no date32\[day\] value"),
        ("day", "2024-02-30", r"is no date32\[day\] value"),
        ("day", datetime.datetime(2024, 1, 2), r"'day' of type date32\[day\] cannot be compared"),
        ("at", "2024-01-31 12:00:00", r"give '2024-01-31 12:00:00' for column 'at' as a timestamp with its zone"),
        ("at", datetime.date(2024, 1, 31), r"with its zone, e\.g\."),
        ("at", "0001-01-01 00:00:00+01:00", r"give .* with its zone"),
        ("at", "9999-12-31 23:59:59-01:00", r"give .* with its zone"),
        ("clock", "2024-01-31 12:00:00+00:00", r"without a zone, e\.g\."),
        ("clock", "noon", r"'noon' is no timestamp\[us\] value"),
    ],
)
def test_bind_refuses_what_spark_decides_otherwise(name: str, value: Any, message: str) -> None:
    """A comparison through a session's casts, or none at all, is an error that names column, type and literal."""
    with pytest.raises(PredicateError, match=message):
        bind_compare(FIELDS[name], "=", value)
    with pytest.raises(PredicateError, match=message):
        bind_in(FIELDS[name], [value])


@pytest.mark.parametrize("kind", [pa.struct([("x", pa.int32())]), pa.list_(pa.int32()), pa.duration("us")])
def test_bind_refuses_types_without_literals(kind: pa.DataType) -> None:
    """Nested columns and intervals are compared with NULL only."""
    with pytest.raises(PredicateError, match=r"'c' of type .* cannot be compared with 1"):
        bind_compare(pa.field("c", kind), "=", 1)


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
    """Dates and timestamps that Python cannot hold are rows like others."""
    days = pa.array([-(2**31) + 1, 19000, 2**31 - 1], pa.int32()).cast(pa.date32())
    assert evaluate(Compare("d", "<", datetime.date(2024, 1, 1)), {"d": days}, 3).to_pylist() == [True, True, False]
    clock = pa.array([-(2**62), 0, 2**62], pa.timestamp("us"))
    node = In("t", (datetime.datetime(1970, 1, 1),), has_null=False, negated=True)
    assert evaluate(node, {"t": clock}, 3).to_pylist() == [True, False, True]


def test_constants_without_columns() -> None:
    """TRUE, FALSE and NULL need no column, and answer for every row."""
    assert [evaluate(Constant(v), {}, 2).to_pylist() for v in (True, False, None)] == [
        [v, v] for v in (True, False, None)
    ]
    assert columns_of(Constant(True)) == frozenset()
    assert columns_of(Or((Constant(True, "a"), And((IsNull("b"), Compare("c", "=", 1)))))) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-01-31", datetime.datetime(2024, 1, 31)),
        ("2024-01-31 12:30", datetime.datetime(2024, 1, 31, 12, 30)),
        (" 2024-01-31T12:30:45.5 ", datetime.datetime(2024, 1, 31, 12, 30, 45, 500000)),
        ("2024-01-31 12:30:45.000001Z", datetime.datetime(2024, 1, 31, 12, 30, 45, 1, UTC)),
        ("2024-01-31 12:30:45 UTC", datetime.datetime(2024, 1, 31, 12, 30, 45, tzinfo=UTC)),
    ],
)
def test_parse_timestamp(text: str, expected: datetime.datetime) -> None:
    """Parts may be left out from the end; the zone is Z, UTC or an offset."""
    assert parse_timestamp(text) == expected
    assert parse_timestamp(text).tzinfo == expected.tzinfo


@pytest.mark.parametrize(
    "text", ["", "2024", "2024-1-31", "20240131", "2024-W05-3", "2024-01-31 25:00", "2024-01-31 12:00:00.1234567",
             "2024-01-31+01:00", "2024-01-31 12:00 Europe/Paris", "٢٠٢٤-٠١-٣١", "2024-01-31 12:00:00.5.5"],
)  # fmt: skip
def test_other_spellings_of_times_are_refused(text: str) -> None:
    """What Spark reads otherwise, or some Python does not read, raises ValueError."""
    for parse in (parse_timestamp, parse_date):
        with pytest.raises(ValueError, match=r".*"):
            parse(text)
