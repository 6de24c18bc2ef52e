"""The same rows as Spark's own reader, for generated tables and generated predicates."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.spark.types import struct_type
from tests.fuzzing import MORE
from tests.spark.common import Calls, conf, load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

T = TypeVar("T")
SEED = int(os.environ.get("LOOKUPCACHE_TEST_SEED", "20240131"))
ROWS = 240
PREDICATES = 25 * MORE  # per table
THROUGH_SPARK = 4 * MORE  # of them, per table and way
UTC = datetime.timezone.utc


def drawn(strategy: st.SearchStrategy[T], count: int, salt: str) -> list[T]:
    """`count` values of a strategy, the same for the same seed and salt."""
    found: list[T] = []

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
        found.append(value)

    collect()
    return found


# --- columns --------------------------------------------------------------------------------------


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
TIMES = st.datetimes(datetime.datetime(1901, 1, 1), datetime.datetime(2200, 1, 1)) | st.datetimes(
    TIME, datetime.datetime(2024, 1, 2)
)
INSTANTS = TIMES.map(lambda t: t.replace(tzinfo=UTC))
SINGLES = st.floats(width=32)
DOUBLES = st.floats() | st.sampled_from([0.0, -0.0, math.nan, 0.1])


def either(values: Sequence[T], fresh: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """Mostly values of the table, so that predicates have answers."""
    known = [value for value in values if value is not None]
    return (st.sampled_from(known) | st.sampled_from(known) | fresh) if known else fresh


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
        "deep",
        pa.list_(pa.struct([("at", pa.timestamp("us", "UTC")), ("tags", _TAGS)])),
        st.lists(st.none() | _DEEP, max_size=2),
        False,
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


# --- literals: values as Spark SQL writes them ----------------------------------------------------


def quoted(text: str) -> str:
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(char, char) for char in text) + "'"


def double(value: float) -> str:
    if math.isnan(value) or math.isinf(value):
        return f"CAST('{value}' AS DOUBLE)"
    return f"{value!r}D" if "e" not in repr(value) else repr(value)


def instant(value: datetime.datetime, hours: int) -> str:
    """The same instant, written in a zone `hours` from UTC."""
    shifted = value.astimezone(datetime.timezone(datetime.timedelta(hours=hours)))
    return f"TIMESTAMP '{shifted.isoformat(' ')}'"


def literals(column: Column, known: Sequence[Any]) -> st.SearchStrategy[str]:
    """Mostly values of the table, in each way in which they are written, and numbers that the type does not have."""
    kind, near = column.type, either(known, column.values)
    if pa.types.is_boolean(kind):
        return st.sampled_from(["true", "false"])
    if pa.types.is_integer(kind):
        most = 2**kind.bit_width
        long = near.map(lambda i: f"{i}L" if abs(i) < 2**62 else str(i))
        halves = st.integers(-1000, 1000).map("{}.5".format)
        numbers = (most, -most, 2 * most, most // 2, 10**25, -(10**25))
        return st.one_of(
            near.map(str),
            near.map(str),
            near.map("{}.00".format),
            near.map(float).map(double),
            long,
            halves,
            listed(numbers),
        )
    if pa.types.is_decimal(kind):
        most, exact = 10 ** (kind.precision - kind.scale), near.map("{:f}".format)
        ways = [exact, exact, st.integers(-most + 1, most - 1).map(str), near.map(float).map(double)]
        if kind.precision < 37:  # with more, Spark rounds and lookup.where refuses
            numbers = (most, -most, most + 1, 20 * most)
            ways += [listed(numbers), st.builds("{0:f}{1:02}".format, near, st.integers(0, 99))]
        return st.one_of(ways)
    if pa.types.is_floating(kind):
        single = near.filter(lambda v: math.isnan(v) or math.isinf(v) or abs(v) < 3e38)
        small = st.decimals(-1000, 1000, places=2, allow_nan=False).map("{:f}".format)
        numbers = ("0.0", "-0.0D", "CAST('NaN' AS DOUBLE)", "CAST('-Infinity' AS DOUBLE)", "0.1F")
        cast = single.map("CAST('{!r}' AS FLOAT)".format)
        return st.one_of(
            near.map(double), near.map(double), small, st.integers(-5, 2**33).map(str), cast, listed(numbers)
        )
    if pa.types.is_binary(kind):
        return near.map(lambda b: f"X'{b.hex()}'")
    if pa.types.is_date(kind):
        return near.map("DATE '{}'".format) | near.map("'{}'".format)
    if pa.types.is_timestamp(kind):
        if kind.tz is not None:
            return st.builds(instant, near, st.sampled_from([0, 0, 1, -8, 13]))
        return st.one_of(near.map("TIMESTAMP_NTZ '{}'".format), near.map("'{}'".format), DAYS.map("DATE '{}'".format))
    return near.map(quoted)


def listed(values: Sequence[Any]) -> st.SearchStrategy[str]:
    return st.sampled_from(values).map(str)


# --- tables ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Table:
    """Files in a directory, the columns they hold, and a few known values of each."""

    path: Path
    columns: list[Column]
    known: dict[str, list[Any]]


def column_values(column: Column, rows: int, rng: random.Random) -> tuple[list[Any], list[Any]]:
    """(values of the rows with nulls among them, the distinct ones they are taken from)."""
    pool = drawn(column.values, 14, f"values of {column.name} {rng.random()}")
    nulls = rng.choice([0.0, 0.1, 0.1, 0.6])
    picked = [None if rng.random() < nulls else rng.choice(pool) for _ in range(rows)]
    return picked, pool


def arrow_table(columns: Sequence[Column], rng: random.Random) -> tuple[pa.Table, dict[str, list[Any]]]:
    arrays, known = {"row_id": pa.array(range(ROWS))}, {}
    for column in columns:
        values, known[column.name] = column_values(column, ROWS, rng)
        arrays[column.name] = pa.array(values, column.type)
    table = pa.table(arrays)
    ordered = rng.choice([c.name for c in columns if c.compared and not pa.types.is_dictionary(c.type)])
    # Sorted by one column, so that the bounds of row groups differ and prune.
    order = pa.compute.sort_indices(table, [(ordered, "ascending")])
    shuffled = table.take(order)
    return shuffled.set_column(0, "row_id", pa.array(range(ROWS))), known


def written_by_arrow(path: Path, rng: random.Random) -> Table:
    """Several files of small row groups, in each of the encodings pyarrow offers."""
    columns = [*PRIMITIVES, *NESTED, *FOREIGN]
    table, known = arrow_table(columns, rng)
    path.mkdir(parents=True)
    for number, start in enumerate(range(0, ROWS, 80)):
        pq.write_table(
            table.slice(start, 80),
            path / f"part-{number}.parquet",
            row_group_size=rng.choice([7, 20, 80]),
            compression=rng.choice(["snappy", "zstd", "gzip", "none"]),
            use_dictionary=rng.choice([True, False]),
            version=rng.choice(["1.0", "2.6"]),
            data_page_version=rng.choice(["1.0", "2.0"]),
            store_decimal_as_integer=rng.choice([True, False]),
            write_statistics=rng.random() < 0.8,
        )
    return Table(path, columns, known)


def written_in_partitions(path: Path, rng: random.Random) -> Table:
    """Hive directories of an integer, a date and a text column, with nulls and characters that are escaped."""
    columns = PRIMITIVES[:12]
    table, known = arrow_table(columns, rng)
    places = [
        (year, day, town)
        for year in ("-7", "2024", "__HIVE_DEFAULT_PARTITION__")
        for day in ("2024-01-01", "2024-02-29")
        for town in ("Bonn %2F Beuel", "a%3Db", "__HIVE_DEFAULT_PARTITION__")
    ]
    for number, (year, day, town) in enumerate(places):
        directory = path / f"year={year}" / f"day of={day}" / f"Town={town}"
        directory.mkdir(parents=True)
        start, end = (ROWS * n // len(places) for n in (number, number + 1))
        pq.write_table(table.slice(start, end - start), directory / "data.parquet", row_group_size=5)
    years, days = [-7, 2024], [datetime.date(2024, 1, 1), datetime.date(2024, 2, 29)]
    partitions = [
        Column("year", pa.int32(), whole_numbers(32)),
        Column("day of", pa.date32(), DAYS),
        Column("Town", pa.string(), TEXT),
    ]
    towns = ["Bonn / Beuel", "a=b"]
    return Table(path, [*columns, *partitions], known | {"year": years, "day of": days, "Town": towns})


def written_by_spark(path: Path, rng: random.Random, spark: SparkSession, timestamps: str) -> Table:
    """Files as Spark writes them; INT96 timestamps among them."""
    columns = [*PRIMITIVES, *NESTED]
    table, known = arrow_table(columns, rng)
    with conf(spark, "spark.sql.parquet.outputTimestampType", timestamps):
        frame = spark.createDataFrame(table, struct_type(table.schema)).repartitionByRange(2, "row_id")
        frame.write.option("parquet.block.size", "4096").option("parquet.page.size", "512").parquet(str(path))
    return Table(path, columns, known)


# --- predicates -----------------------------------------------------------------------------------


def leaves(table: Table) -> st.SearchStrategy[str]:
    """A comparison of one column, in each of the ways `lookup.where` knows."""
    compared = [c for c in table.columns if c.compared]
    each = [_comparisons(c, table.known[c.name]) for c in compared]
    nulls = st.sampled_from(table.columns).flatmap(
        lambda c: st.sampled_from([f"{c.sql} IS NULL", f"{c.sql} IS NOT NULL"])
    ) | st.sampled_from([f"{c.sql} <=> NULL" for c in compared])
    constants = st.sampled_from(["true", "false", "(NULL AND true)"])
    return st.sampled_from(range(12)).flatmap(lambda n: constants if n == 0 else nulls if n <= 2 else st.one_of(each))


def _comparisons(column: Column, known: Sequence[Any]) -> st.SearchStrategy[str]:
    literal = literals(column, known)
    several = st.lists(literal | literal | st.just("NULL"), min_size=1, max_size=4).map(", ".join)
    negation = st.sampled_from(["", "NOT "])
    ways = [
        st.builds("{0} {1} {2}".format, st.just(column.sql), st.sampled_from(["=", "==", "<>", "!=", "<", "<=", ">", ">="]), literal),
        st.builds("{0} {1} {2}".format, literal, st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), st.just(column.sql)),
        st.builds("{0} <=> {1}".format, st.just(column.sql), literal),
        st.builds("{0} {1}IN ({2})".format, st.just(column.sql), negation, several),
        st.builds("{0} {1}BETWEEN {2} AND {3}".format, st.just(column.sql), negation, literal, literal),
    ]  # fmt: skip
    if column.values is TEXT:
        prefix = either(list(known), TEXT).map(lambda t: "".join(c for c in t[:2] if c not in "%_\\"))
        ways.append(
            st.builds("{0} {1}LIKE {2}".format, st.just(column.sql), negation, prefix.map(lambda p: quoted(p + "%")))
        )
    if pa.types.is_boolean(column.type):
        ways.append(st.just(column.sql.upper()))
    return st.one_of(ways)


def predicates(table: Table) -> st.SearchStrategy[str]:
    """Leaves under AND, OR and NOT."""

    def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        two = st.builds("({0} {1} {2})".format, inner, st.sampled_from(["AND", "OR"]), inner)
        return two | st.builds("NOT ({0})".format, inner) | st.builds("{0} AND NOT {1}".format, inner, inner)

    return st.recursive(leaves(table), combined, max_leaves=4)


# --- comparison -----------------------------------------------------------------------------------


def hits_of_frames(frames: Sequence[DataFrame]) -> list[set[int]]:
    """The row ids of each frame, all in one Spark job."""
    for number, frame in enumerate(frames):
        frame.createOrReplaceTempView(f"q{number}")
    found: list[set[int]] = [set() for _ in frames]
    parts = (f"SELECT {number} AS q, row_id FROM q{number}" for number in range(len(frames)))
    answers = frames[0].sparkSession.sql(" UNION ALL ".join(parts)).toArrow()
    for q, row_id in zip(answers.column("q").to_pylist(), answers.column("row_id").to_pylist(), strict=True):
        assert row_id not in found[q], "a row twice"
        found[q].add(row_id)
    return found


def plain(value: Any) -> Any:
    """A value under which NaN equals itself, and -0.0 does not equal 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else (math.copysign(1.0, value), value)
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def rows_by_id(table: pa.Table) -> dict[int, Any]:
    found = {row["row_id"]: plain(row) for row in table.to_pylist()}
    assert len(found) == table.num_rows
    return found


def differences(ours: pa.Table, theirs: pa.Table) -> list[tuple[int, str, Any, Any]]:
    """Where two tables differ: (row id, column, ours, theirs)."""
    found, expected = rows_by_id(ours), rows_by_id(theirs)
    assert found.keys() == expected.keys()
    return [
        (row_id, name, found[row_id][name], value)
        for row_id, row in expected.items()
        for name, value in row.items()
        if found[row_id][name] != value
    ]


ARROW = ("arrow-1", "arrow-2", "arrow-3") if MORE > 1 else ("arrow-1",)
TIMESTAMPS = {"spark-int96": "INT96", "spark-micros": "TIMESTAMP_MICROS"}
TABLES = [*ARROW, "partitions", *TIMESTAMPS]


def made(name: str, path: Path, spark: SparkSession) -> Table:
    rng = random.Random(f"{SEED} {name}")
    if name in ARROW:
        return written_by_arrow(path, rng)
    if name == "partitions":
        return written_in_partitions(path, rng)
    return written_by_spark(path, rng, spark, TIMESTAMPS[name])


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Table]]:
    """Each table, written once."""
    root = tmp_path_factory.mktemp("same_rows")
    # With it, Spark's reader drops rows of -0.0 where a row group's dictionary says they are not 0.0.
    with conf(spark, "spark.sql.parquet.filterPushdown", "false"):
        yield {name: made(name, root / name, spark) for name in TABLES}


def generated(name: str, table: Table) -> list[str]:
    return list(dict.fromkeys(drawn(predicates(table), PREDICATES, f"predicates of {name}")))


@pytest.mark.parametrize("name", TABLES)
def test_whole_tables_are_equal(name: str, tables: dict[str, Table], spark: SparkSession) -> None:
    """Every value of every row is Spark's, through Spark and without it, and so are the column types."""
    table = tables[name]
    theirs, ours = spark.read.parquet(str(table.path)), load(spark, table.path)
    assert ours.dtypes == theirs.dtypes
    expected = theirs.toArrow()
    assert expected.num_rows == ROWS
    assert not differences(ours.toArrow(), expected)
    assert not differences(LookupTable(str(table.path)).scan(), expected)
    assert not differences(LookupTable(str(table.path), {"lookup.cache": "FULL"}).scan(), expected)


def test_predicates_answer_as_spark_does(tables: dict[str, Table], spark: SparkSession) -> None:
    """Generated predicates select the rows that Spark's reader gives, and some of them prune."""
    compared = pruned = probed = 0
    for name, table in tables.items():
        texts = generated(name, table)
        theirs = spark.read.parquet(str(table.path))
        expected: list[set[int]] = []
        for start in range(0, len(texts), 45):
            expected += hits_of_frames([theirs.where(text) for text in texts[start : start + 45]])
        with LookupTable(str(table.path)) as ours:
            for text, rows in zip(texts, expected, strict=True):
                found = ours.scan(columns=["row_id"], predicate=text).column("row_id").to_pylist()
                assert len(found) == len(set(found)), f"seed {SEED}, table {name}: a row twice for {text}"
                assert set(found) == rows, f"seed {SEED}, table {name}: {text}"
            metrics = ours.metrics()
            pruned += metrics["rowGroupsPrunedCount"]
            if name == "partitions":
                assert metrics["filesPrunedCount"] > 0
            probed += from_snapshots(name, table, dict(zip(texts, expected, strict=True)))
        compared += len(texts)
    assert min(compared, pruned, probed) >= len(tables) * PREDICATES * 5 // 6


def from_snapshots(name: str, table: Table, expected: Mapping[str, set[int]]) -> int:
    """Ask the full caches over each column as key for the predicates that name it; how many that were."""
    asked = 0
    for column in table.columns:
        if not column.compared:
            continue
        options = {"lookup.keys": f"`{column.name}`", "lookup.cache": "FULL"}
        with LookupTable(str(table.path), options) as full:
            for text in [text for text in expected if column.sql in text]:
                found = full.scan(columns=["row_id"], predicate=text).column("row_id").to_pylist()
                assert sorted(found) == sorted(expected[text]), f"seed {SEED}, table {name}, key {column.name}: {text}"
                asked += 1
            assert full.metrics()["snapshotReadThroughCount"] == 0
    return asked


@pytest.mark.parametrize("way", ["where", "filter", "both", "pushed"])
def test_predicates_answer_alike_in_spark(way: str, tables: dict[str, Table], spark: SparkSession) -> None:
    """`lookup.where`, a Spark filter above a read, both at once, and what Spark pushes for `lookup.filter-pushdown` select the rows
    that Spark's reader gives; what is pushed prunes row groups."""
    compared = pruned = 0
    with conf(spark, "spark.sql.python.filterPushdown.enabled", str(way == "pushed").lower()):
        for name, table in tables.items():
            whole, theirs = load(spark, table.path), spark.read.parquet(str(table.path))
            texts = generated(name, table)[-THROUGH_SPARK:]
            pairs = [
                (one, other if way == "both" else "true") for one, other in zip(texts, reversed(texts), strict=True)
            ]
            if way == "pushed":
                parts = drawn(leaves(table), 2 * THROUGH_SPARK, f"pushed to {name}")
                pairs = list(zip(parts[::2], parts[1::2], strict=False))
                # Each read is loaded for itself: until Spark 5.0 the scans of one relation share what was pushed to any.
                pushing = {"lookup.filter-pushdown": "true"}
                ours = [load(spark, table.path, pushing).where(one).where(other) for one, other in pairs]
            elif way == "filter":
                ours = [whole.where(one) for one, _ in pairs]
            else:
                ours = [load(spark, table.path, {"lookup.where": one}).where(other) for one, other in pairs]
            expected = [theirs.where(one).where(other) for one, other in pairs]
            calls = Calls(table.path)
            for pair, found, rows in zip(pairs, hits_of_frames(ours), hits_of_frames(expected), strict=True):
                assert found == rows, f"seed {SEED}, table {name}, {way}: {pair}"
            pruned += calls.since()["rowGroupsPrunedCount"]
            compared += len(pairs)
    assert compared >= len(tables) * THROUGH_SPARK * 2 // 3
    assert way != "pushed" or pruned >= len(tables) * THROUGH_SPARK * 2 // 3
