"""Columns of every type that Spark writes or reads, with values for their rows, which a seed draws."""

import dataclasses
import datetime
import decimal
import math
import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import hypothesis
import pyarrow as pa
from hypothesis import strategies as st

T = TypeVar("T")
SEED = int(os.environ.get("LOOKUPCACHE_TEST_SEED", "20240131"))
ROWS = 240
UTC = datetime.timezone.utc
UTC_TIME = pa.timestamp("us", "UTC")


def drawn(strategy: st.SearchStrategy[T], count: int, salt: str) -> list[T]:
    """`count` values of a strategy, the same for the same seed and salt."""
    values: list[T] = []

    @hypothesis.seed(f"{SEED} {salt}")
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: T) -> None:
        values.append(value)

    collect()
    return values


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's name and type, and values for its rows. `compared`: with literals, not only with null."""

    name: str
    type: pa.DataType
    values: st.SearchStrategy[Any]
    compared: bool = True

    @property
    def sql(self) -> str:
        return f"`{self.name}`"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x1a\b"), max_size=4) | st.sampled_from(
    ["", "a", "ab", "abc", "b", "é", "éa", "z", "\U0001f600", "\uffff", "it's", "a\\b", "a%b", "a_b", " a", "A", "\0"]
)
BYTES = st.binary(max_size=3)
DAY = datetime.date(2024, 1, 1)
DAYS = st.dates(datetime.date(1, 1, 3), datetime.date(9999, 12, 28)) | st.dates(DAY, datetime.date(2024, 1, 9))
TIME = datetime.datetime(2024, 1, 1)
TIMES = st.datetimes(datetime.datetime(1901, 1, 1), datetime.datetime(2200, 1, 1))
TIMES |= st.datetimes(TIME, datetime.datetime(2024, 1, 2))
INSTANTS = TIMES.map(lambda t: t.replace(tzinfo=UTC))
SINGLES = st.floats(width=32)
DOUBLES = st.floats() | st.sampled_from([0.0, -0.0, math.nan, 0.1])


def whole_numbers(bits: int) -> st.SearchStrategy[int]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return st.integers(low, high) | st.integers(-3, 3) | st.sampled_from([low, low + 1, high - 1, high])


def decimals(precision: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    most = 10**precision - 1
    digits = st.integers(-most, most) | st.integers(-300, 300) | st.sampled_from([most, -most, 0])
    return digits.map(lambda d: decimal.Decimal(d).scaleb(-scale, decimal.Context(prec=60)))


PRIMITIVES = [
    Column("flag", pa.bool_(), st.booleans()),
    Column("tiny", pa.int8(), whole_numbers(8)),
    Column("small", pa.int16(), whole_numbers(16)),
    Column("plain", pa.int32(), whole_numbers(32)),
    Column("Big Number", pa.int64(), whole_numbers(64)),
    Column("single", pa.float32(), SINGLES),
    Column("double", pa.float64(), DOUBLES),
    Column("money", pa.decimal128(9, 2), decimals(9, 2)),
    Column("precise", pa.decimal128(18, 6), decimals(18, 6)),
    Column("huge", pa.decimal128(38, 10), decimals(38, 10)),
    Column("name", pa.string(), TEXT),
    Column("bytes", pa.binary(), BYTES),
    Column("day", pa.date32(), DAYS),
    Column("at", pa.timestamp("us", "UTC"), INSTANTS),
    Column("wall.clock", pa.timestamp("us"), TIMES),
]
_PAIR = pa.struct([("x", pa.int32()), ("y", pa.string())])
_TAGS = pa.map_(pa.string(), pa.list_(pa.date32()))
_TAGGED = st.dictionaries(TEXT, st.lists(st.none() | DAYS, max_size=2), max_size=2).map(lambda d: list(d.items()))
_DEEP = st.fixed_dictionaries({"at": st.none() | INSTANTS, "tags": st.none() | _TAGGED})
_MAPS = st.dictionaries(TEXT, st.none() | st.floats(), max_size=2).map(lambda d: list(d.items()))
NESTED = [
    Column("pair", _PAIR, st.fixed_dictionaries({"x": st.none() | whole_numbers(32), "y": st.none() | TEXT}), False),
    Column("list", pa.list_(pa.int64()), st.lists(st.none() | whole_numbers(64), max_size=3), False),
    Column("map", pa.map_(pa.string(), pa.float64()), _MAPS, False),
    Column(
        "deep", pa.list_(pa.struct({"at": UTC_TIME, "tags": _TAGS})), st.lists(st.none() | _DEEP, max_size=2), False
    ),
]
# Types that Arrow writes and Spark does not, but reads.
FOREIGN = [
    Column("u8", pa.uint8(), st.integers(0, 2**8 - 1)),
    Column("u16", pa.uint16(), st.integers(0, 2**16 - 1)),
    Column("u32", pa.uint32(), st.integers(0, 2**32 - 1)),
    Column("long text", pa.large_string(), TEXT),
    Column("codes", pa.dictionary(pa.int16(), pa.string()), TEXT),
    Column("paris", pa.timestamp("us", "Europe/Paris"), INSTANTS),
    Column("list of long text", pa.large_list(pa.large_string()), st.lists(st.none() | TEXT, max_size=2), False),
]


def arrow_table(columns: Sequence[Column], rng: random.Random) -> tuple[pa.Table, dict[str, list[Any]]]:
    """(rows with nulls among them, the distinct values of each column that they are taken from)."""
    arrays, pools = {"row_id": pa.array(range(ROWS))}, {}
    for column in columns:
        pools[column.name] = pool = drawn(column.values, 14, f"values of {column.name} {rng.random()}")
        nulls = rng.choice([0.0, 0.1, 0.1, 0.6])
        values = [None if rng.random() < nulls else rng.choice(pool) for _ in range(ROWS)]
        arrays[column.name] = pa.array(values, column.type)
    table = pa.table(arrays)
    ordered = rng.choice([c.name for c in columns if c.compared and not pa.types.is_dictionary(c.type)])
    # Sorted by one column, so that the bounds of row groups differ and prune.
    order = pa.compute.sort_indices(table, [(ordered, "ascending")])
    shuffled = table.take(order)
    return shuffled.set_column(0, "row_id", pa.array(range(ROWS))), pools
